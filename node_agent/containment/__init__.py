"""Isolation of one attempt at a time, and its kill with proof. Knows neither the queue nor keys."""

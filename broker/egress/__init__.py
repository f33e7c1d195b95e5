"""Egress: the one thing that a job with net grants reaches, and the only way from there to what it was granted."""

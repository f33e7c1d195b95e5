"""Retries, dead letters, unique names, rates, concurrency limits and priorities."""

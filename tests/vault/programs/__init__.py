"""Programs that stand in for jobs."""

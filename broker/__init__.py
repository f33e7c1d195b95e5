"""The vault broker: hands secrets to jobs on their own host, never through the queue."""

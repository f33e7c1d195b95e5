"""Properties of the pure core, for random jobs on random hosts."""

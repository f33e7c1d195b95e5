"""Shapes of work: jobs that wait for others, canvases, batches, values, and the ways to call them."""

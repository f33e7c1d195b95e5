"""Many agents at once: real claim loops and signatures, jobs that only take time."""

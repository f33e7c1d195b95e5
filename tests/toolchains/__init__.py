"""Real toolchains, run inside jobs as people use them, and a census of the system calls that they make."""

"""Port: the files that a job asks its node for: volumes in memory and in the store, never a path of the host."""

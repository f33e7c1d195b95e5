"""Attacks from inside a job, each really tried. Runs as root (level A) and again as an ordinary user (level B)."""

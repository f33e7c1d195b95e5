"""Tests of the broker's processes, and of the pure parts of the egress process."""

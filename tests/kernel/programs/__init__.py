"""Modules of tasks that the tests of this folder serve; a task path, so they are imported by their bare names."""

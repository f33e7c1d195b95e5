"""Tests of what operators order of nodes and queues."""

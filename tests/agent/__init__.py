"""Tests of the node agent's own parts."""

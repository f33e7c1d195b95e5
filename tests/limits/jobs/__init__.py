"""Tasks that nodes serve in the tests of limits."""

"""Whole fleets through the command line, as users run them."""

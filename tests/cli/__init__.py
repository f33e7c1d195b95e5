"""The command line: what it prints, what it accepts, how it ends."""

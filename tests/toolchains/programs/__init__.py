"""The programs that the toolchain tests run in jobs; each also runs alone, for the census."""

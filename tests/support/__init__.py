"""What every test may use: a store of its own, waiting without sleeping, and checks that nothing leaks."""

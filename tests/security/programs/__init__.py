"""What hostile jobs run. Each file reaches an interpreter as text (tests.security.jobs), so it stands alone."""

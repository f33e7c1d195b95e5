"""Programs and tasks that e2e jobs run."""

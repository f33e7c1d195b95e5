"""Port: what a running job may ask its node: calls, checked, recorded and answered from outside the sandbox."""

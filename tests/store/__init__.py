"""The queue's scripts, its Redis port and the hardening, against a real Valkey."""

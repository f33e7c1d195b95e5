"""The jobs of both sides."""

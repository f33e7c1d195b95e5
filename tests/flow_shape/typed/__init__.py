"""Snippets that type checkers read and nobody runs."""

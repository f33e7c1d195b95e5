"""Tests of stores: users and their rights, settings, forms of a store."""

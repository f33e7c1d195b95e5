"""Tests of the kernel: what a running job may ask its node."""

"""Tests of Ringfence. They start what they need on private sockets and leave nothing behind."""

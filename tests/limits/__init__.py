"""Limits, the reasons of ends, pause and resume, and kills without proof: each really tried."""

"""Proof of the path that bytes take between two ranks."""

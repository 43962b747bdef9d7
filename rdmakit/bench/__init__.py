"""Measures each layer alone and the whole, with one loop, and checks every value."""

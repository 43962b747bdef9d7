"""Thin doors: one for each outside library or kernel interface."""

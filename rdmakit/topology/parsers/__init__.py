"""Texts of other tools into facts: what is in the text, what is not, and never an exception."""

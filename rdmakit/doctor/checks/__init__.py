"""The checks, one small module for each subject. ``catalog`` lists them."""

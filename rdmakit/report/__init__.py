"""How results are shown and kept."""

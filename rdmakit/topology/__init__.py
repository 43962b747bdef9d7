"""What a machine is made of and how it is wired: pure data, parsers and decisions."""

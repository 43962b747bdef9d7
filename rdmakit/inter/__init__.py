"""Between nodes: messages."""

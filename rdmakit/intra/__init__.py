"""Inside a node: memory that all its ranks can address."""

"""A process from its start to its end."""

"""Follows a process from start to exit."""

"""Requests of commands to running processes."""

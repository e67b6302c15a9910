"""Replaces the weights of a running server."""

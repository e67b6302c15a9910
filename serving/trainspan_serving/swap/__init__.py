"""Exchanges the weights under a running server."""

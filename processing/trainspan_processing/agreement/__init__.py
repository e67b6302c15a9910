"""Compares judges with people's labels, and with each other."""

"""Measurements of the whole loop."""

"""Turns every generation into a call span."""

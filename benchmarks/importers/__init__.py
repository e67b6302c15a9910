"""Measurements of `trainspan import`."""

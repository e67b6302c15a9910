"""Measurements of `trainspan view`."""

"""Measurements of the runner."""

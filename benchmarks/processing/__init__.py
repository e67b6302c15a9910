"""Measurements of building datasets."""

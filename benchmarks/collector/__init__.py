"""Measurements of the collector."""

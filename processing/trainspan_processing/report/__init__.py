"""Draws pages and plots about a dataset."""

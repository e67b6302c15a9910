"""Measurements of the trainer."""

"""Weights in memory, and Adam's state."""

"""Weights on disk, and the outcome of each dataset."""

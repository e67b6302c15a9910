"""Weights on disk, and what became of each dataset."""

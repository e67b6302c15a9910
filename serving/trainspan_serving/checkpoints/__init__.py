"""Validates checkpoints without loading them."""

"""Micro-batch to loss."""

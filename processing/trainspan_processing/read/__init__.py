"""Reads the stores over Arrow Flight in bounded batches."""

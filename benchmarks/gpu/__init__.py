"""Measurements for a machine with one GPU and no network; see README.md."""

"""Folders and files that one process leaves for another: datasets, checkpoints, runs, per-token figures."""

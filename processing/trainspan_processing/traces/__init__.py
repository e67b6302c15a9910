"""Turns spans into calls and rollouts, before any tokens are read."""

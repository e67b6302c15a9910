"""Turns evaluations into rewards of rollouts and calls."""

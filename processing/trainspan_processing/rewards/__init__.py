"""Evaluations to rewards of rollouts and calls."""

"""Tracks the rollout of the running code."""

"""Coding harnesses: how one is pointed at the policy, what it needs, and the folders that a rollout of it has."""

"""Executes the agent: one process per rollout for commands, a few worker processes for functions."""

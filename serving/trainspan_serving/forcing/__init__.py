"""Answers the first calls of a branch with the stored tokens of the rollout that it branches from."""

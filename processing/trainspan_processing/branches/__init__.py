"""Branches of rollouts: which states to branch from, the stored calls to repeat, and the values that the branches measure."""

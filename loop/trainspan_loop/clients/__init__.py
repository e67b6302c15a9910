"""Requests to the policy servers and the stores of a run."""

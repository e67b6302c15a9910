"""Measurements of the policy server."""

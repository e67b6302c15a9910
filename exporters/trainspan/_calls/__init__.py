"""Requests to the policy server."""

"""Spans to calls and rollouts, before any token is read."""

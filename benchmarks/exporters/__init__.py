"""Measurements of agents with tracing."""

"""Helpers of the measurements: workloads, clocks and statistics."""

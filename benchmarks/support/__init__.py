"""Helpers of the measurements: what is sent, and how time is taken and compared."""

"""Measurements. Each module has `measure()`, which returns plain figures; `python -m benchmarks` runs them all and stores JSON."""

"""Measurements. Each module's `measure()` returns plain figures; `python -m benchmarks` runs them and stores JSON."""

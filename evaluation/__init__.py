"""Evaluation on tasks of four frameworks: `python -m evaluation run TASK`, `python -m evaluation report`."""

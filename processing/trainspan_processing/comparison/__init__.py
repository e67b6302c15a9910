"""`trainspan diff`: what changed from one dataset to another."""

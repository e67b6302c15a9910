"""What the loop knows of a run, on disk."""

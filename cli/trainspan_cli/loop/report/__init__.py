"""What a run leaves to look at."""

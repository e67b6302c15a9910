"""A round, from dataset to checkpoint."""

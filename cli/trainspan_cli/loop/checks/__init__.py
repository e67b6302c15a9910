"""What must hold in a round, and when a run ends."""

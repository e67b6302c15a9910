"""Which tokens could come at each position of a constrained call."""

"""The tokens allowed at each position of a constrained call."""

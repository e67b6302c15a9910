"""Arrow Flight out: reads from a snapshot."""

"""The protocol: pure functions, no I/O."""

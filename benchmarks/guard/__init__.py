"""Whether the working tree is slower than the last stored baseline."""

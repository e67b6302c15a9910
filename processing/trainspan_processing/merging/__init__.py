"""Which calls continue which, token for token, and why others do not."""

"""What may be served, read without loading it."""

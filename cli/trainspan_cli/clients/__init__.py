"""What commands ask of running processes."""

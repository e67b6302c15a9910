"""What was said, as text that is safe to show."""

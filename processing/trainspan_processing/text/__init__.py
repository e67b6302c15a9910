"""Messages and tokens as text that is safe to show."""

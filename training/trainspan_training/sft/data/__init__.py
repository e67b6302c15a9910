"""From conversations to training rows."""

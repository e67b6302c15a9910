"""Every generation becomes a call span."""

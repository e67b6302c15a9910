"""Who may connect, where, and within which limits."""

"""Finds calls that continue earlier calls, token for token, and the causes if they do not."""

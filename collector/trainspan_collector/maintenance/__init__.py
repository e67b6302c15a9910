"""Maintenance of a store: verify, stats, compact, purge, retention."""

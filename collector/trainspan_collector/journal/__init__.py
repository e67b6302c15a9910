"""The journal: a request is on disk before it is acknowledged."""

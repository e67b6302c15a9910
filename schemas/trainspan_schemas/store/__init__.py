"""Access to the store: its address and credentials, the collector's roles, its tables and public views."""

"""Settings: every section with its defaults, how they are read, and their documentation."""

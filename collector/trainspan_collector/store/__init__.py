"""The DuckDB file: opening, migrating, inserting, snapshots, and queries in separate processes."""

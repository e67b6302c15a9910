"""The DuckDB file: opening, inserting, snapshots, and queries in separate processes."""

"""The DuckDB file: opening, migrating, inserting, snapshots, and queries in processes of their own."""

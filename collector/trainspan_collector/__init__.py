"""The collector: OTLP in, a journal and DuckDB as storage, Arrow Flight out."""

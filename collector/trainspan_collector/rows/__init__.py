"""OTLP messages to rows of the store's tables."""

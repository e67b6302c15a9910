"""The stores, read over Arrow Flight in bounded batches."""

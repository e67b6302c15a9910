"""From Parquet to optimizer steps to micro-batches; NumPy only."""

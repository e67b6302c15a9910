"""Datasets on disk: Parquet, ledger, and the difference of two datasets."""

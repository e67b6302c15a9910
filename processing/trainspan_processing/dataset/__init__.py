"""Datasets on disk: Parquet, ledger, and the comparison of two datasets."""

"""The models of the pages: read-only, bounded reads of stores, run folders and datasets."""

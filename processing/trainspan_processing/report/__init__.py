"""Pages and plots about a dataset."""

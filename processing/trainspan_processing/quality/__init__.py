"""The quality of a dataset: what its manifest says, as figures and as a page with small plots."""

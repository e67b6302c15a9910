"""Journal to rows to store, in the background."""

"""Labels: what may be labeled, what people said, what is worth labeling, and how labels reach the collector."""

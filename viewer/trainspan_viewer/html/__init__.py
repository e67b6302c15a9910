"""HTML from elements, so that every text is escaped."""

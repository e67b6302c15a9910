"""From micro-batch to loss."""

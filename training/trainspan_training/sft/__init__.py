"""`trainspan sft`: conversations to a model that has learned to answer like them."""

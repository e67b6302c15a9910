"""The pages about one rollout, one call and one group: pure functions from a model to elements."""

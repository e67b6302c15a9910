"""The pages: pure functions from a model to elements."""

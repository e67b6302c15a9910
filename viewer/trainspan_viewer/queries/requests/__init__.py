"""A request to explain a rollout: from an address, to links, and within limits on what is read for it."""

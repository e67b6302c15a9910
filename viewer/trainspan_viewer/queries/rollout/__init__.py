"""The models of the pages about one rollout, one call and one group, from `trainspan explain`'s own accounts."""

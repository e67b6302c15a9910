"""`trainspan explain`: shows one rollout with its calls, rewards and credit, as the dataset step sees it."""

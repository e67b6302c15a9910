"""The models of the pages about datasets: the list of them, and one with its groups, rollouts and filters."""

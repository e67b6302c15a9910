"""Judge models that score by the criteria of a rubric: each rollout alone, those of a group together, or stored ones with their calls."""

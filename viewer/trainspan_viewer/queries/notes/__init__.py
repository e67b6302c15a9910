"""Notes that people attach to runs, datasets, groups, rollouts and calls: the only thing that the viewer writes."""

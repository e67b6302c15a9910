"""Other projects on the same workload, each run by an interpreter with its packages."""

"""The supervised loop: starts the other processes by their commands and repeats rollouts, dataset, training.

`rounds` is the loop itself. Below it: `state/` on disk, `checks/` of each round, `processes/` it starts, and the `report/` it leaves.
"""

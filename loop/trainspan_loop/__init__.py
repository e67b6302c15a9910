"""The supervised loop: starts the other processes through their commands and repeats rollouts, dataset, training.

`rounds` is the loop itself, with `validation` between rounds. It uses `sampling/` (where the rollouts come from), `state/`
(files of a run), `checks/` (of each round), `processes/` (started by the loop) and `report/` (of a run).
"""

"""The supervised loop: starts the other processes by their commands and repeats rollouts, dataset, training."""

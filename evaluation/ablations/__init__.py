"""Ablations: ways to train the calculator, compared in one process (`arms`, `in_memory`), and the model that one of them needs."""

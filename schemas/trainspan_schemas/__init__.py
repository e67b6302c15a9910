"""Contracts between trainspan's processes: names, record types, file layouts and errors. Standard library only.

In reading order:

- `telemetry/`: what spans and requests carry: attribute keys, identity and its signature, tokens, constraints, statuses.
- `store/`: access to the store: its address and credentials, the collector's roles, its tables and public views.
- `artifacts/`: what one process leaves for another: datasets, checkpoints, runs, per-token figures.
- `config/`: settings, how they are read, and their documentation.
- `agents/`: functions and agents of users, and the worker's messages.
- `home`, `secret_files`, `durable`, `intervals`, `errors`: the state folder, files, confidence intervals, the error tree.
"""

"""From stored spans to training rows: calls, rollouts, rewards, credit, Parquet. Knows nothing of vLLM or TRL.

In reading order:

- `read/`: the stores, over Arrow Flight.
- `traces/`: spans to calls and rollouts, before any token is read.
- `rewards/`: evaluations to rewards of rollouts and calls.
- `credit/`: rewards to advantages.
- `reasons/`: why a call is not trained.
- `merging/`: which calls continue which, token for token.
- `assembly/`: one dataset, chunk by chunk.
- `dataset/`: datasets on disk.
- `report/`, `explain/`, `export/`: what looks at stores and datasets.
- `tables`, `stored_rollout`, `text/`: the schemas between the stages, what users' functions are given, and safe text.
"""

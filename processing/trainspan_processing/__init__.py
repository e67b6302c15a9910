"""Turns stored spans into training rows: calls, rollouts, rewards, credit, Parquet. Independent of vLLM and TRL.

In reading order:

- `read/`: reads the stores over Arrow Flight.
- `traces/`: turns spans into calls and rollouts, before any tokens are read.
- `rewards/`: turns evaluations into rewards of rollouts and calls.
- `credit/`: turns rewards into advantages.
- `reasons/`: finds the reasons for which calls are not trained.
- `merging/`: finds calls that continue earlier calls, token for token.
- `assembly/`: builds one dataset, chunk by chunk.
- `dataset/`: datasets on disk.
- `explain/`, `export/`: accounts of rollouts, and training files for other tools.
- `tables`, `stored_rollout`, `text/`: schemas between the stages, input of users' functions, and safe text.
"""

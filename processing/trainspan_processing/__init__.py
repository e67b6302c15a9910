"""From stored spans to training rows: calls, rollouts, rewards, credit, Parquet. Knows nothing of vLLM or TRL."""

"""From settings to a supervised vLLM."""

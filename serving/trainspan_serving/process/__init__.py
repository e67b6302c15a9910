"""Starts and supervises vLLM as the settings describe."""

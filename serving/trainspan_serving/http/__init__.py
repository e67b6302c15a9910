"""Our endpoints and responses, next to vLLM's own."""

"""Our endpoints and answers, beside vLLM's own."""

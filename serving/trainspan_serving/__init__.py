"""The policy server: vLLM with token-exact capture of every call and hot swap of the weights."""

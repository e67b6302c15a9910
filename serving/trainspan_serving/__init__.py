"""The policy server: vLLM with token-exact capture of every call and hot swap of the weights.

In reading order:

- `process/`: from settings to a supervised vLLM.
- `middleware`, `worker`: the classes that vLLM loads (`--middleware`, `--worker-extension-cls`).
- `capture/`: turns every generation into a call span.
- `export/`: sends call spans to the collector.
- `checkpoints/`: validates checkpoints without loading them.
- `swap/`: replaces the weights of a running server.
- `http/`: our endpoints and responses.
"""

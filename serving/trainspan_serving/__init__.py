"""The policy server: vLLM with token-exact capture of every call and hot swap of the weights.

In reading order:

- `process/`: from settings to a supervised vLLM.
- `middleware`, `worker`: what vLLM loads of ours (`--middleware`, `--worker-extension-cls`).
- `capture/`: every generation becomes a call span.
- `export/`: call spans to the collector.
- `checkpoints/`: what may be served, read without loading it.
- `swap/`: exchanges the weights under a running server.
- `http/`: our endpoints and answers.
"""

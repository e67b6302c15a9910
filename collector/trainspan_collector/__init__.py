"""The collector: OTLP in, a journal and DuckDB as storage, Arrow Flight out.

In reading order:

- `process`: starts everything from the settings, waits for signals, and reopens the store if needed.
- `session`: one session with an open store, from opening the file to draining the journal.
- `servers`: the OTLP and Flight servers, which outlive the store.
- `receive/`: a request is authorized, checked, redacted and durable before it is answered.
- `journal/`: a request is on disk before it is acknowledged.
- `rows/`: OTLP messages to rows.
- `store/`: the DuckDB file, and queries on it.
- `load/`: journal to rows to store, in the background.
- `maintenance/`: verify, stats, compact, purge, retention.
- `query/`: Arrow Flight out.
- `otlp/`, `network/`, `runtime/`: the protocol, the listeners' access control and limits, the process.
"""

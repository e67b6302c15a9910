"""Settings of the collector, and of all ports together."""

from dataclasses import dataclass

from trainspan_schemas.config.marks import Advanced

__all__ = ["CollectorSettings", "PortsSettings"]


@dataclass(frozen=True, slots=True)
class PortsSettings:
    """`[ports]`: where all processes of a state folder listen."""

    base: int | None = None
    """First of five ports: OTLP/gRPC, OTLP/HTTP, Arrow Flight, the policy server and the viewer, except those that are set
    themselves; 0: any free ones; default: 4317 to 4319, 8000 and 8088.

    Commands with the same state folder know ports that were free from it. `trainspan status` shows them, for agents that are
    started by hand."""


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """`[collector]`: OTLP in, DuckDB, Arrow Flight out."""

    store: str | None = None
    """DuckDB file of the store; default: `$TRAINSPAN_HOME/spans.duckdb`."""
    endpoints: tuple[str, ...] = ("http://127.0.0.1:4317",)
    """OTLP/gRPC URLs of all collectors, to which the policy server, the runner and its agents send; default: that of `grpc`.

    Each rollout goes to one of them, chosen by its id and the URLs' hosts and ports: write them the same way on all machines.
    The loop's own collector is named by its address if it listens on a loopback address.
    `OTEL_EXPORTER_OTLP_ENDPOINT` is the agent's own and is not read."""
    stores: tuple[str, ...] = ()
    """Stores of all collectors, as paths or `grpc://HOST:PORT`, which commands read together; default: that of `store`.

    The loop starts a collector only if this list is empty."""
    grpc: str = "127.0.0.1:4317"
    """OTLP/gRPC listener: HOST:PORT, or `off`."""
    http: str = "127.0.0.1:4318"
    """OTLP/HTTP listener: HOST:PORT, or `off`."""
    flight: str = "127.0.0.1:4319"
    """Arrow Flight listener: HOST:PORT."""
    load_interval_s: Advanced[float] = 2.0
    """Maximum age of journaled spans before they are loaded. Readers do not wait for it."""
    load_max_bytes: Advanced[int] = 32 * 1024 * 1024
    """Journal size at which a batch is loaded, regardless of its number of spans."""
    max_request_bytes: Advanced[int] = 64 * 1024 * 1024
    """Maximum size of one OTLP request, before and after decompression."""
    max_request_items: Advanced[int] = 200_000
    """Maximum number of spans, log records or metrics in one OTLP request."""
    max_inflight_bytes: Advanced[int] = 256 * 1024 * 1024
    """Maximum size of all requests in memory. Requests beyond it wait, and are then refused."""
    min_free_disk_bytes: Advanced[int] = 512 * 1024 * 1024
    """Free disk space below which requests are refused."""
    overload_wait_s: Advanced[float] = 1.0
    """How long a request waits for capacity before it is refused. Keep it below the exporters' timeouts."""
    sql_timeout_s: Advanced[float] = 60.0
    """Time limit of a user's query."""
    sql_memory_bytes: Advanced[int] = 512 * 1024 * 1024
    """Memory limit of a user's query.

    Half of it is for DuckDB, an eighth if a thousand of the store's largest rows would not fit into it; large sorts and joins
    spill to disk beyond that. A query that needs more is ended."""
    duckdb_memory_bytes: Advanced[int] = 144 * 1024 * 1024
    """DuckDB's memory limit for loading and for named reads.

    DuckDB uses one thread per 64 MiB. Larger work spills to disk. If loading still runs out of memory, the store is reopened
    with twice the limit."""
    checkpoint_bytes: Advanced[int] = 256 * 1024 * 1024
    """Size of the loaded journal at which DuckDB is checkpointed and that journal deleted."""
    retention_days: float | None = None
    """Days after which a trace that receives nothing new is deleted; default: never."""
    token_file: str | None = None
    """TOML file with one line `role = "token"` for each role; default: `$TRAINSPAN_HOME/tokens.toml`.

    The file has mode 0600, and the roles are agent, serving, runner, reader and user.
    The default file is created if it does not exist, and a sender without a token is then an agent."""
    tls_cert: str | None = None
    """PEM certificate chain of all listeners; default: no TLS."""
    tls_key: str | None = None
    """PEM key of `tls_cert`; default: no TLS."""
    blocked_keys: str = ""
    """Comma-separated attribute keys that are removed before storing; `prefix*` matches all keys that begin with `prefix`."""
    allowed_hosts: str = ""
    """Comma-separated names that OTLP/HTTP accepts in the Host header if no token file is set.

    They are in addition to localhost and this machine's own names. Addresses are always accepted."""
    insecure_allow_remote: bool = False
    """Listen on addresses that other machines can reach without a token file and TLS."""

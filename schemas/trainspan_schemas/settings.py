"""Every setting of `trainspan.toml`, by section, with its default.

Paths are relative to the working directory unless absolute; None means "under `$TRAINSPAN_HOME`" where a path is meant.
"""

from dataclasses import dataclass, field

__all__ = [
    "CollectorSettings",
    "DatasetSettings",
    "LoopSettings",
    "RolloutsSettings",
    "ServingSettings",
    "Settings",
    "TrainSettings",
]


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """`[collector]`: OTLP in, DuckDB, Arrow Flight out."""

    store: str | None = None
    """Path of the DuckDB file; default `$TRAINSPAN_HOME/spans.duckdb`."""
    grpc: str = "127.0.0.1:4317"
    """HOST:PORT of OTLP/gRPC, or "off"."""
    http: str = "off"
    """HOST:PORT of OTLP/HTTP, or "off"."""
    flight: str = "127.0.0.1:4319"
    """HOST:PORT of Arrow Flight."""
    load_interval_s: float = 2.0
    """Greatest age of journalled spans before the loader takes them; a reader does not wait for it."""
    load_max_bytes: int = 32 * 1024 * 1024
    """Journal bytes after which a batch is loaded whatever its number of spans."""
    max_request_bytes: int = 64 * 1024 * 1024
    """Greatest size of one OTLP request, before and after decompression."""
    max_inflight_bytes: int = 256 * 1024 * 1024
    """Bytes of requests held in memory at once; over it a request waits, then is refused."""
    min_free_disk_bytes: int = 512 * 1024 * 1024
    """Free disk below which requests are refused."""
    overload_wait_s: float = 1.0
    """How long a request waits for room before it is refused; less than exporters' timeouts."""
    sql_timeout_s: float = 60.0
    """Time after which a user's query is ended."""
    duckdb_memory_bytes: int = 1024 * 1024 * 1024
    """DuckDB's memory limit. Larger work spills to disk; where loading cannot, the store is opened again with twice of it."""
    checkpoint_bytes: int = 256 * 1024 * 1024
    """Size of the loaded journal at which DuckDB is checkpointed and that journal deleted."""
    insecure_allow_remote: bool = False
    """Listen on addresses that other machines can reach, without access control."""


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """`[serving]`: the policy server."""

    model: str | None = None
    """Model directory or Hugging Face id; default: the newest checkpoint."""
    checkpoints: str | None = None
    """Folder of checkpoints; default `$TRAINSPAN_HOME/checkpoints`."""
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str = "policy"
    """Model name that clients use."""
    collector: str = "http://127.0.0.1:4317"
    """OTLP/gRPC endpoint for call spans; "none" switches capture's export off."""
    dtype: str | None = None
    """Weights' dtype; default float32 on a CPU, bfloat16 on a GPU."""
    max_model_len: int | None = None
    """Context length in tokens; default: the model's own."""
    train_sampling: bool = False
    """Override a client's temperature, top_p and top_k for training rollouts: temperature 1, nothing truncated."""
    swap_timeout_s: float = 30.0
    """How long requests are held while weights are swapped before they get 503 with Retry-After."""
    drain_timeout_s: float = 120.0
    """How long a swap waits for requests under way before it gives up and the earlier policy goes on."""
    canary_tolerance: float | None = None
    """Greatest |Δ log-probability| at a swap; default: the checkpoint's own."""


@dataclass(frozen=True, slots=True)
class RolloutsSettings:
    """`[rollouts]`: tasks in, agent executions out."""

    tasks: str | None = None
    """Task file: JSONL, Parquet or CSV."""
    n: int = 8
    """Rollouts per task."""
    concurrency: int = 16
    """Rollouts under way at once."""
    workers: int = 1
    """Worker processes for a `module:function` target."""
    timeout_s: float = 120.0
    """Seconds after which a rollout is stopped with status `timeout`."""
    retries: int = 1
    """Further attempts after an infrastructure failure."""
    judge: str | None = None
    """`module:function` that gives the reward; the agent's own evaluations then do not count."""
    policy_url: str = "http://127.0.0.1:8000/v1"
    """Base URL of the policy, handed to agents as OPENAI_BASE_URL."""
    collector: str = "http://127.0.0.1:4317"
    """OTLP/gRPC endpoint for the spans of runner and agents."""


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """`[dataset]`: stored spans in, transitions with credit out."""

    out: str | None = None
    """Folder of datasets; default `$TRAINSPAN_HOME/dataset`."""
    credit: str = "identical"
    """How a rollout's rewards are given to its calls: a built-in name or `module:function`."""
    baseline: str | None = None
    """Advantage baseline; default `grpo`, or `running` where no rollout has a task id."""
    reward: str | None = None
    """`module:function(StoredRollout)` that replaces stored rewards."""
    reward_name: str = "reward"
    """Name of the evaluation that is the reward."""
    gamma: float = 1.0
    """Discount per call for `return_to_go`."""
    max_staleness: int | None = None
    """Greatest (newest version − call's version) that is still trained; default: no limit."""
    max_tokens: int | None = None
    """Longest prompt + completion in tokens; longer calls are dropped, never cut."""
    settle_s: float = 60.0
    """Seconds of silence after which a rollout that is not complete counts as `unfinished`."""
    wait_s: float = 0.0
    """How long to wait for rollouts that are still arriving."""
    min_coverage: float = 0.5
    """Least share of calls that must be trainable; below it the command fails."""
    keep_zero_spread: bool = False
    """Keep groups whose rewards are all equal (their advantage is 0)."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """`[train]`: Parquet in, optimizer steps, checkpoints out."""

    model: str | None = None
    """Model directory or Hugging Face id to start from where there is no checkpoint yet; default: the one last served."""
    checkpoints: str | None = None
    """Folder of checkpoints; default `$TRAINSPAN_HOME/checkpoints`."""
    policy_url: str = "http://127.0.0.1:8000"
    """Policy server to swap after each round, or "none"."""
    learning_rate: float = 3e-4
    steps_per_round: int = 4
    """Optimizer steps per round; rollouts are split among them whole."""
    epsilon: float = 0.2
    """Lower clip of the importance ratio: 1 − ε."""
    epsilon_high: float | None = None
    """Upper clip of the importance ratio: 1 + ε, default 0.28; with `cispo` its greatest value ε, default 5."""
    loss: str = "dapo"
    """`dapo` or `cispo`."""
    weights: str = "rollout"
    """`rollout` (mean over rollouts of the mean over their tokens) or `token` (mean over tokens)."""
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 16384
    """Greatest number of padded tokens in one forward pass."""
    merge: bool = True
    """Merge the calls of a segment into one row: each token is forwarded once."""
    max_kl: float = 0.5
    """Stop the round, and keep the previous policy, when k3 against the sampling policy exceeds this."""
    engine_mismatch: float = 1e-3
    """Alarm when |Δ log-probability| server − trainer at the first step of a round exceeds this (float32, fresh data)."""
    keep_checkpoints: int = 5
    """Newest checkpoints kept on disk; `latest` and its parent always are."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`[loop]`: all of it, supervised."""

    rounds: int = 20
    target: str | None = None
    """The agent: `module:function`, `file.py:function`, or a command line."""
    tasks_per_round: int = 32
    """Training tasks drawn for each round."""
    eval_tasks: int = 500
    """Validation tasks rolled out once each before the first and after the last round; 0: none."""
    val_tasks: int = 100
    """Validation tasks rolled out once each in between."""
    eval_every: int = 5
    """Rounds between validations; 0: only at the start and the end."""
    eval_n: int = 1
    """Rollouts per validation task; several give pass@k beside the mean."""
    success_reward: float = 1.0
    """Least reward of a rollout that counts as solved in pass@k."""
    stop_at: float | None = None
    """End the run when a validation reaches this success; default: never."""
    patience: int | None = None
    """End the run after so many validations without a better one; default: never."""
    max_hours: float | None = None
    """End the run after so many hours of rounds and validations; default: never."""
    keep_best: bool = True
    """Keep the checkpoint of the best validation in the run's folder `best/`, whatever is pruned."""
    probe_tasks: str | None = None
    """Task file of a hard probe, rolled out before and after, reported under its own name, never trained on."""
    restarts: int = 3
    """How often each process is restarted after it ended by itself."""
    ready_timeout_s: float = 600.0
    """How long to wait for collector, policy server and trainer to come up."""
    seed: int = 0
    """Seed of the draw of tasks."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All sections of `trainspan.toml`."""

    collector: CollectorSettings = field(default_factory=CollectorSettings)
    serving: ServingSettings = field(default_factory=ServingSettings)
    rollouts: RolloutsSettings = field(default_factory=RolloutsSettings)
    dataset: DatasetSettings = field(default_factory=DatasetSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

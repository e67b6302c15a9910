"""Every setting of `trainspan.toml`, by section, with its default.

Paths are relative to the working directory unless absolute; None means "under `$TRAINSPAN_HOME`" where a path is meant.
"""

from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "DEFAULT_LORA_RANK",
    "CollectorSettings",
    "DatasetSettings",
    "LoopSettings",
    "RolloutsSettings",
    "ServingSettings",
    "Settings",
    "TrainSettings",
]


DEFAULT_LORA_RANK: Final = 16
"""Rank of the adapter that is trained where `[train] lora_rank` is not set, and of those that are served with it."""


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """`[collector]`: OTLP in, DuckDB, Arrow Flight out."""

    store: str | None = None
    """Path of the DuckDB file; default `$TRAINSPAN_HOME/spans.duckdb`."""
    grpc: str = "127.0.0.1:4317"
    """HOST:PORT of OTLP/gRPC, or "off"."""
    http: str = "127.0.0.1:4318"
    """HOST:PORT of OTLP/HTTP, or "off"."""
    flight: str = "127.0.0.1:4319"
    """HOST:PORT of Arrow Flight."""
    load_interval_s: float = 2.0
    """Greatest age of journalled spans before the loader takes them; a reader does not wait for it."""
    load_max_bytes: int = 32 * 1024 * 1024
    """Journal bytes after which a batch is loaded whatever its number of spans."""
    max_request_bytes: int = 64 * 1024 * 1024
    """Greatest size of one OTLP request, before and after decompression."""
    max_request_items: int = 200_000
    """Greatest number of spans, log records or metrics of one OTLP request."""
    max_inflight_bytes: int = 256 * 1024 * 1024
    """Bytes of requests held in memory at once; over it a request waits, then is refused."""
    min_free_disk_bytes: int = 512 * 1024 * 1024
    """Free disk below which requests are refused."""
    overload_wait_s: float = 1.0
    """How long a request waits for room before it is refused; less than exporters' timeouts."""
    sql_timeout_s: float = 60.0
    """Time after which a user's query is ended."""
    sql_memory_bytes: int = 512 * 1024 * 1024
    """Memory that a user's query may use; one that needs more is ended."""
    duckdb_memory_bytes: int = 144 * 1024 * 1024
    """DuckDB's memory limit. Larger work spills to disk; where loading cannot, the store is opened again with twice of it."""
    checkpoint_bytes: int = 256 * 1024 * 1024
    """Size of the loaded journal at which DuckDB is checkpointed and that journal deleted."""
    retention_days: float | None = None
    """Days after which a trace that gets nothing new is deleted; default: never."""
    token_file: str | None = None
    """TOML file, mode 0600, of lines `role = "token"` for the roles agent, serving, runner, reader and user; default:
    `$TRAINSPAN_HOME/tokens.toml`, which is made, and then who sends without a token is an agent."""
    tls_cert: str | None = None
    """PEM certificate chain of all listeners; default: no TLS."""
    tls_key: str | None = None
    """Its PEM key."""
    blocked_keys: str = ""
    """Comma-separated attribute keys that are removed before storing; one that ends in `*` stands for all that begin so."""
    allowed_hosts: str = ""
    """Comma-separated names in the Host header that OTLP/HTTP answers where no token file is set, beside localhost and this
    machine's own; addresses always are."""
    insecure_allow_remote: bool = False
    """Listen on addresses that other machines can reach, without a token file and TLS."""


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """`[serving]`: the policy server."""

    model: str | None = None
    """Model directory or Hugging Face id; default: the newest checkpoint."""
    checkpoints: str | None = None
    """Folder of checkpoints; default `$TRAINSPAN_HOME/checkpoints`."""
    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: str = ""
    """Comma-separated names in the Host header with which a swap (and an order to sleep or wake) is accepted, beside localhost,
    this machine's own and `host`; addresses always are."""
    served_name: str = "policy"
    """Model name that clients use."""
    collector: str = "http://127.0.0.1:4317"
    """OTLP/gRPC endpoint for call spans; "none" switches capture's export off."""
    token_file: str | None = None
    """The collector's token file, for the token of `serving`; default: that of the collector on this machine, else as
    OTEL_EXPORTER_OTLP_HEADERS says."""
    dtype: str | None = None
    """Weights' dtype; default float32 on a CPU, bfloat16 on a GPU."""
    max_model_len: int | None = None
    """Context length in tokens; default: the model's own."""
    max_lora_rank: int | None = None
    """Serve LoRA adapters up to this rank; default: that of `[train]` where it trains adapters, or of the adapter that is
    the model, else full weights only."""
    signing_key_file: str | None = None
    """The runner's key, by which its identities and URLs are told from made-up ones; default `$TRAINSPAN_HOME/signing-key`."""
    require_signature: bool = False
    """Answer only requests whose identity or URL the runner signed; others get 401."""
    sleep: bool = False
    """The server may be put to sleep and give its GPU memory to a trainer meanwhile."""
    spool_max_bytes: int = 1024 * 1024 * 1024
    """Greatest size on disk of the call spans that wait for the collector; beyond it the newest are dropped."""
    train_sampling: bool = False
    """Override a client's temperature, top_p and top_k for training rollouts: temperature 1, nothing truncated."""
    val_temperature: float | None = None
    """Sample validation rollouts at this temperature (0: greedy), nothing truncated; default: as the client asks."""
    strict_tools: bool = True
    """Whether calls of tools with `strict: true` must follow the tool's schema, as in vLLM by default; false samples them freely."""
    body_timeout_s: float = 60.0
    """How long the body of a request may take to arrive before it gets 408."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Greatest size of a request's body; a longer one gets 413."""
    swap_timeout_s: float = 30.0
    """How long requests are held while weights are swapped before they get 503 with Retry-After."""
    drain_timeout_s: float = 60.0
    """How long a swap, or an order to sleep, waits for generations under way; those that take longer are then ended, and their
    clients get 503 (an error event in a stream)."""
    canary_tolerance: float | None = None
    """Greatest mean |Δ log-probability| server − trainer at a swap; default: 1e-4 at every token if both compute in float32,
    else a mean of 0.2."""


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
    deliver_timeout_s: float = 60.0
    """Seconds that a run waits at its end for a collector that is away; then it fails, and `--resume` sends its verdicts."""
    judge: str | None = None
    """`module:function` that gives the reward; the agent's own evaluations then do not count."""
    judge_concurrency: int = 16
    """Verdicts under way at once, in threads (an `async def` judge: in one event loop); agents go on meanwhile."""
    judge_timeout_s: float = 120.0
    """Seconds after which a verdict is given up: the rollout gets status `judge_error`."""
    policy_url: str = "http://127.0.0.1:8000/v1"
    """Base URL of the policy, handed to agents as OPENAI_BASE_URL."""
    collector: str = "http://127.0.0.1:4317"
    """OTLP/gRPC endpoint for the spans of runner and agents."""
    signing_key_file: str | None = None
    """The key that identities and URLs are signed with; default `$TRAINSPAN_HOME/signing-key`, which is made if it is not
    there. A policy server with another state folder needs a copy."""
    token_file: str | None = None
    """The collector's token file: the runner sends the token of `runner`, agents are given that of `agent`; default: that of the
    collector on this machine, else as OTEL_EXPORTER_OTLP_HEADERS says."""


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """`[dataset]`: stored spans in, transitions with credit out."""

    out: str | None = None
    """Folder of datasets; default `$TRAINSPAN_HOME/dataset`."""
    credit: str = "identical"
    """How a rollout's rewards are given to its calls: `identical`, `return_to_go`, `step`, `gigpo`, `per_agent` or
    `module:function`."""
    baseline: str | None = None
    """Advantage baseline; default `grpo`, or `running` where no rollout has a task id."""
    reward: str | None = None
    """`module:function(StoredRollout)` that replaces stored rewards."""
    status_rewards: str | None = None
    """Rewards of rollouts that failed, as `timeout=0,agent_error=-1`; default: they are dropped by their status."""
    reward_concurrency: int = 1
    """Calls of `reward` under way at once, in threads: above 1 the function must be thread-safe, and gains where it waits."""
    reward_timeout_s: float = 120.0
    """Seconds after which a call of `reward` is given up: the rollout is left out as `judge_error`."""
    reward_name: str = "reward"
    """Name of the evaluation that is the reward; several as `correct=1,style=0.2,tools?=0.1`: weights, and `?` for one that
    a rollout may lack."""
    combine: str = "sum"
    """Several rewards: `sum` (added up, then compared) or `gdpo` (each compared, then added up and scaled by the batch)."""
    air: str | None = None
    """Rules that turn signals of the trace into rewards of single calls, as `tool_error=-0.1,repeated_call=-0.05`."""
    overlong: str = "keep"
    """Calls that end by length: `keep`, `mask` (they are not trained) or `punish` (their reward is lowered)."""
    overlong_penalty: float | None = None
    """With `punish`: what is taken from the reward of such a call; default 1."""
    gamma: float = 1.0
    """Discount per call for `return_to_go` and `gigpo`."""
    group_over: str = "rollouts"
    """What a group's statistics are over: `rollouts`, or `calls` (a rollout with more calls then weighs more)."""
    step_by: str = "turn"
    """What `step` compares within a group: calls of the same `turn`, or of the same `agent`."""
    episode_weight: float = 1.0
    """Weight of the whole rollout's comparison in `gigpo`."""
    state_weight: float = 1.0
    """Weight of the comparison among calls from the same state in `gigpo`."""
    agent_credit: str | None = None
    """Estimators for `per_agent`, as `planner=rloo,coder=return_to_go+grpo,*=rae`; others take `baseline`."""
    agents: str | None = None
    """Agents whose calls are trained, as `planner,coder`; default: all."""
    policies: str | None = None
    """Policies whose calls are trained; default: all."""
    choices: str = "used"
    """Of several answers to one request (n > 1): train those that the agent went on with (`used`), or `all`."""
    filter: str | None = None
    """`module:function(StoredRollout) -> bool`: which rollouts are trained; default: all."""
    split: str = "recorded"
    """Which tasks are for training: as `recorded`, `all`, or a share of them such as 0.9 by a hash of the task id."""
    admit: str | None = None
    """Reasons for which calls are not left out: `unstated_sampling`, calls that a client recorded without stating temperature,
    top_p and constraints, if the server's defaults are 1, 1 and none; `unsigned`, calls whose caller named a rollout without its
    runner's signature, if the policy server cannot have the runner's key; `untrusted_reward`, rewards that a process without
    the tokens gave to rollouts that no runner began; `untrusted`, calls that were recorded by the agent's side."""
    max_staleness: int | None = None
    """Greatest (newest version − call's version) that is still trained; default: no limit."""
    max_tokens: int | None = None
    """Longest prompt + completion in tokens; longer calls are dropped, never cut."""
    settle_s: float = 60.0
    """Seconds of silence after which a rollout that is not complete counts as `unfinished`."""
    wait_s: float = 0.0
    """How long to wait for rollouts that are still arriving."""
    group_wait_s: float = 300.0
    """Seconds since a task's rollouts were last heard of, for which its group waits for the ones that its runner still makes; then
    it is taken as it is. Two timeouts of the runner and a minute, by default."""
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
    publish_timeout_s: float = 300.0
    """How long a swap is asked for again while the server is busy, or away after it was there in the same round."""
    learning_rate: float | None = None
    """Of AdamW; default: what fits the model: 2e-5 up to 135 million weights, falling to 1e-6 at a billion; ten times as much
    for an adapter."""
    warmup_rounds: int = 0
    """Rounds of a run over which the learning rate rises from 0."""
    decay: str = "constant"
    """What the learning rate does then: `constant`, or `linear` or `cosine` down to a tenth of it at `decay_rounds`."""
    decay_rounds: int | None = None
    """Round of a run at which decay ends; needed by `linear` and `cosine`."""
    weight_decay: float = 0.0
    """Of AdamW; norms and biases are left out."""
    adam_beta1: float = 0.9
    """How much of its mean of gradients Adam keeps at a step."""
    adam_beta2: float = 0.999
    """The same of the mean of their squares; 0.95 to 0.99 follows gradients of changing size faster."""
    steps_per_round: int = 4
    """Optimizer steps per round; rollouts are split among them whole."""
    loss: str = "clip"
    """`clip` (PPO's surrogate: the ratio is clipped) or `cispo` (it is capped, and every token gives a gradient)."""
    epsilon: float | None = None
    """Lower clip of the importance ratio: 1 − ε; default 0.2, with `ratio = "call"` 3e-4; not with `cispo`."""
    epsilon_high: float | None = None
    """Upper clip of the importance ratio: 1 + ε, default 0.28, with `ratio = "call"` 4e-4; with `cispo` its greatest value ε,
    default 5."""
    ratio: str = "token"
    """Unit of the importance ratio: `token`, or `call` (geometric mean over a call's tokens, GSPO)."""
    weights: str = "rollout"
    """`rollout` (mean over rollouts of the mean over their tokens), `token` (mean over tokens), `const` or `module:function`."""
    const_tokens: int | None = None
    """With weights `const`: the tokens by which the sum over each rollout is divided, whatever its length."""
    kl_coef: float = 0.0
    """Coefficient of the KL divergence to the model that the run started from, in the loss; 0: that model is not loaded."""
    old_policy: str | None = None
    """What the ratio is taken against: `logged` (the sampler) or `recompute` (the policy at the round's start);
    default: `logged` if all calls are of the current version and server and trainer compute alike, in float32."""
    correction: str | None = None
    """With `recompute`: weight of a token by w = π_old/π_sampler: `truncate` (min(w, cap), the default), `mask`
    (w within 1/cap … cap, else 0) or `none`."""
    correction_cap: float | None = None
    """Cap of `correction`; default 2."""
    reject_ratio: float | None = None
    """With `recompute`: a call whose geometric mean of w is outside 1/x … x is not trained; default: none is rejected."""
    max_staleness: int | None = None
    """Calls of a policy more versions behind than this are not trained; default: no limit."""
    adapter: str = "none"
    """`none` (all weights are trained) or `lora` (a low-rank adapter beside frozen weights)."""
    lora_rank: int | None = None
    """Rank of the adapter; default 16."""
    lora_alpha: float | None = None
    """The adapter's output is scaled by alpha / rank; default: twice the rank."""
    lora_targets: str | None = None
    """Names of the adapted modules, with commas; default: all linear layers but the output head."""
    max_grad_norm: float = 1.0
    """Gradient norm to which a greater one is clipped."""
    dtype: str | None = None
    """What is computed in, from float32 weights: `float32` or `bfloat16` (autocast); default: bfloat16 on a GPU, else float32."""
    gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass instead of keeping them; default: on a GPU only."""
    memory_gib: float | None = None
    """Memory that the trainer may use on its device; default: what is free there when it starts."""
    micro_batch_tokens: int | None = None
    """Greatest number of tokens, padding included, in one forward pass; default: 16384, or as many as memory has room for."""
    merge: bool = True
    """Merge the calls of a segment into one row: each token is forwarded once per rollout."""
    forward: str = "auto"
    """`padded` rows, `packed` ones (one after another, no padding), `tree` (tokens that rollouts share are forwarded once), or
    the cheapest."""
    max_kl: float = 0.5
    """End the round, and keep the previous policy, when k3 against the ratio's other policy exceeds this."""
    max_ratio: float = 1000.0
    """The same for the greatest importance ratio of a token."""
    max_loss: float = 100.0
    """The same for the absolute value of a step's loss."""
    engine_mismatch: float | None = None
    """Alarm if the mean |Δ log-probability| server − trainer at the first step of a round on fresh data exceeds this, or k3
    its square; default: 3e-5 if both compute in float32, else 0.1."""
    keep_checkpoints: int = 5
    """Newest checkpoints kept on disk; `latest` and its parent always are."""
    report_to: str = "none"
    """Where the figures of each round are shown beside `metrics.jsonl`: `tensorboard`, `trackio`, `wandb`, several with
    commas, or `none`."""
    seed: int = 0
    """Of the order of rollouts, and of a new adapter."""


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
    """End the run when a validation reaches this mean reward; default: never."""
    patience: int | None = None
    """End the run after so many validations without a better one; default: never."""
    max_hours: float | None = None
    """End the run after so many hours of rounds and validations; default: never."""
    keep_best: bool = True
    """Keep the checkpoint of the best validation in the run's folder `best/`, whatever is pruned."""
    probe_tasks: str | None = None
    """Task file of a hard probe, rolled out before and after, reported under its own name, never trained on."""
    server_devices: str | None = None
    """GPUs of the policy server, as `0` or `0,1`, counted among the visible ones; default: the first. Over several it splits
    the model (tensor parallel)."""
    server_flags: str | None = None
    """Further flags of vLLM, as `--gpu-memory-utilization 0.3`; on a shared GPU its share is 0.4 unless they say another."""
    trainer_devices: str | None = None
    """GPUs of the trainer, one process on each; default: all but the server's, or the only one too."""
    trainer_processes: int | None = None
    """Processes of the trainer where there is no GPU; default: 1."""
    trainer_launch: str | None = None
    """Command that launches the trainer's processes, as `accelerate launch --config_file fsdp.yaml`; default: `torchrun` for
    several."""
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

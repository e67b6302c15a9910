"""Every setting of `trainspan.toml`, by section, with its default.

The text under a field is its documentation everywhere: `docs/configuration.md` and the help of the commands' options are
generated from it (see `setting_docs`). Its first paragraph is also the option's help; a second one is for the page only.
If a default is None, the first paragraph ends with "; default: WHAT." and names the value that is used instead.

Paths are relative to the working directory unless absolute.
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
    "SftSettings",
    "TrainSettings",
    "ViewSettings",
]


DEFAULT_LORA_RANK: Final = 16
"""Rank of a trained adapter if `[train] lora_rank` is not set, and of the adapters that are served with it."""


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """`[collector]`: OTLP in, DuckDB, Arrow Flight out."""

    store: str | None = None
    """DuckDB file of the store; default: `$TRAINSPAN_HOME/spans.duckdb`."""
    grpc: str = "127.0.0.1:4317"
    """OTLP/gRPC listener: HOST:PORT, or `off`."""
    http: str = "127.0.0.1:4318"
    """OTLP/HTTP listener: HOST:PORT, or `off`."""
    flight: str = "127.0.0.1:4319"
    """Arrow Flight listener: HOST:PORT."""
    load_interval_s: float = 2.0
    """Maximum age of journaled spans before they are loaded. Readers do not wait for it."""
    load_max_bytes: int = 32 * 1024 * 1024
    """Journal size at which a batch is loaded, regardless of its number of spans."""
    max_request_bytes: int = 64 * 1024 * 1024
    """Maximum size of one OTLP request, before and after decompression."""
    max_request_items: int = 200_000
    """Maximum number of spans, log records or metrics in one OTLP request."""
    max_inflight_bytes: int = 256 * 1024 * 1024
    """Maximum size of all requests in memory. Requests beyond it wait, and are then refused."""
    min_free_disk_bytes: int = 512 * 1024 * 1024
    """Free disk space below which requests are refused."""
    overload_wait_s: float = 1.0
    """How long a request waits for capacity before it is refused. Keep it below the exporters' timeouts."""
    sql_timeout_s: float = 60.0
    """Time limit of a user's query."""
    sql_memory_bytes: int = 512 * 1024 * 1024
    """Memory limit of a user's query.

    Half of it is for DuckDB, an eighth if a thousand of the store's largest rows would not fit into it; large sorts and joins
    spill to disk beyond that. A query that needs more is ended."""
    duckdb_memory_bytes: int = 144 * 1024 * 1024
    """DuckDB's memory limit for loading and for named reads.

    DuckDB uses one thread per 64 MiB. Larger work spills to disk. If loading still runs out of memory, the store is reopened
    with twice the limit."""
    checkpoint_bytes: int = 256 * 1024 * 1024
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


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """`[serving]`: the policy server."""

    model: str | None = None
    """Model directory or Hugging Face id; default: the newest checkpoint."""
    checkpoints: str | None = None
    """Folder of checkpoints that may be swapped in; default: `$TRAINSPAN_HOME/checkpoints`."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    allowed_hosts: str = ""
    """Comma-separated names that are accepted in the Host header of a request to swap, sleep or wake.

    They are in addition to localhost, this machine's own names and `host`. Addresses are always accepted."""
    served_name: str = "policy"
    """Model name that clients use."""
    collector: str = "http://127.0.0.1:4317"
    """OTLP/gRPC endpoint for call spans; `none` turns off their export."""
    token_file: str | None = None
    """Role tokens of the collector; default: those of the collector on this machine.

    The server sends the token of the role serving.
    If there is no collector on this machine, the headers in OTEL_EXPORTER_OTLP_HEADERS are sent."""
    dtype: str | None = None
    """Data type of the weights; default: float32 on a CPU, bfloat16 on a GPU."""
    max_model_len: int | None = None
    """Context length in tokens; default: the model's own."""
    max_lora_rank: int | None = None
    """Serve LoRA adapters up to this rank; default: the rank of `[train]` or of the served adapter, else no adapters."""
    signing_key_file: str | None = None
    """The runner's key, which proves that an identity or URL is the runner's; default: `$TRAINSPAN_HOME/signing-key`."""
    require_signature: bool = False
    """Answer only requests whose identity or URL the runner signed; others get 401."""
    sleep: bool = False
    """Let a trainer on the same GPU put the server to sleep and use its memory in the meantime."""
    spool_max_bytes: int = 1024 * 1024 * 1024
    """Maximum size on disk of the call spans that wait for the collector; beyond it the newest are dropped."""
    train_sampling: bool = False
    """Sample training rollouts at temperature 1 without truncation, whatever the client asks for.

    It overrides the temperature, top_p and top_k of the request."""
    val_temperature: float | None = None
    """Sample validation rollouts at this temperature without truncation; 0: greedy; default: as the client asks."""
    strict_tools: bool = True
    """Make calls of tools with `strict: true` follow the tool's schema, as vLLM does by default; false samples them freely."""
    body_timeout_s: float = 60.0
    """How long the body of a request may take to arrive before the request gets 408."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Maximum size of a request's body; a longer one gets 413.

    If the length is announced, the answer comes before the body is read."""
    swap_timeout_s: float = 30.0
    """How long a request is held during a swap before it gets 503 with Retry-After."""
    drain_timeout_s: float = 60.0
    """How long a swap or a sleep request waits for running generations before it ends them.

    Their clients get 503, or an error event in a stream.
    Raise it together with `swap_timeout_s` if answers take longer."""
    canary_tolerance: float | None = None
    """Maximum mean |Δ log-probability| between server and trainer at a swap; default: 1e-4 in float32, else 0.2.

    The float32 default applies to each token, and only if both compute in float32; otherwise the mean counts."""


@dataclass(frozen=True, slots=True)
class RolloutsSettings:
    """`[rollouts]`: tasks in, agent executions out."""

    tasks: str | None = None
    """Task file: JSON Lines, CSV or Parquet; default: none."""
    n: int = 8
    """Rollouts per task."""
    concurrency: int = 16
    """Maximum number of rollouts in progress."""
    workers: int = 1
    """Worker processes for a `module:function` target."""
    python: str | None = None
    """Python of these processes, such as `agent-env/bin/python`; default: the runner's own.

    trainspan must be installed in its environment. It is for agents whose packages do not fit next to the trainer's."""
    timeout_s: float = 120.0
    """Seconds after which a rollout is stopped with status `timeout`."""
    retries: int = 1
    """Further attempts after an infrastructure failure."""
    deliver_timeout_s: float = 60.0
    """Seconds that a finished run waits for an unavailable collector before it fails.

    `--resume` then sends its verdicts."""
    judge: str | None = None
    """`module:function` that gives the reward; default: the agent's own evaluations count."""
    judge_concurrency: int = 16
    """Maximum number of verdicts in progress.

    Judges run in threads, or in one event loop if the judge is an `async def`, while agents keep running."""
    judge_timeout_s: float = 120.0
    """Seconds after which a verdict is abandoned and its rollout gets status `judge_error`."""
    policy_url: str = "http://127.0.0.1:8000/v1"
    """Base URL of the policy, passed to agents as OPENAI_BASE_URL."""
    collector: str = "http://127.0.0.1:4317"
    """OTLP/gRPC endpoint for the spans of the runner and its agents."""
    signing_key_file: str | None = None
    """Key that signs identities and URLs; default: `$TRAINSPAN_HOME/signing-key`.

    The default file is created if it does not exist. A policy server with another state folder needs a copy."""
    token_file: str | None = None
    """Role tokens of the collector; default: those of the collector on this machine.

    The runner sends the token of the role runner, and its agents get that of the role agent.
    If there is no collector on this machine, the headers in OTEL_EXPORTER_OTLP_HEADERS are sent."""


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """`[dataset]`: stored spans in, transitions with credit out."""

    out: str | None = None
    """Folder of datasets; default: `$TRAINSPAN_HOME/dataset`."""
    credit: str = "identical"
    """How a rollout's rewards are assigned to its calls: `identical`, `return_to_go`, `step`, `gigpo`, `per_agent`, or
    `module:function`."""
    baseline: str | None = None
    """Advantage baseline: `grpo`, `dr_grpo`, `rloo`, `batch`, `global`, `running`, `rae`, `none`, or `module:function`;
    default: `grpo`, or `running` if no rollout has a task id."""
    reward: str | None = None
    """`module:function` or `file.py:function` that rewards each stored rollout; default: the stored rewards count.

    It is called with a `StoredRollout`."""
    status_rewards: str | None = None
    """Rewards of failed rollouts, such as `timeout=0,agent_error=-1`; default: these rollouts are dropped."""
    reward_concurrency: int = 1
    """Maximum number of calls of `reward` in progress, in threads.

    Above 1 the function must be thread-safe, and it gains time only if it waits."""
    reward_timeout_s: float = 120.0
    """Seconds after which a call of `reward` is abandoned and its rollout dropped as `judge_error`."""
    reward_name: str = "reward"
    """Evaluation that is the reward; several as `correct=1,style=0.2,tools?=0.1`.

    The numbers are weights, and `?` marks one that a rollout may lack."""
    combine: str = "sum"
    """How several rewards are combined: `sum` (add, then compare) or `gdpo` (compare each, then add).

    `gdpo` scales its sum by the batch."""
    air: str | None = None
    """Rewards of single calls from signals of the trace, such as `tool_error=-0.1,parse_error=-0.1`; default: none.

    The signals are `tool_error`, `parse_error` and `repeated_call`."""
    overlong: str = "keep"
    """Calls that reach the length limit: `keep`, `mask` (do not train them) or `punish` (lower their reward)."""
    overlong_penalty: float | None = None
    """Amount that `punish` subtracts from the reward of such a call; default: 1."""
    gamma: float = 1.0
    """Discount per call for `return_to_go` and `gigpo`."""
    group_over: str = "rollouts"
    """What a call is compared with: the group's `rollouts`, its calls of the same turn (`turns`), or all of its `calls`.

    With `turns`, later calls are not compared with earlier ones, which have more reward to come. With `calls`, a rollout with
    more calls has more weight."""
    step_by: str = "turn"
    """Calls that `step` compares within a group: those of the same `turn`, or of the same `agent`."""
    episode_weight: float = 1.0
    """Weight of the comparison of whole rollouts in `gigpo`."""
    state_weight: float = 1.0
    """Weight of the comparison of calls from the same state in `gigpo`."""
    agent_credit: str | None = None
    """Estimators for `per_agent`, such as `planner=rloo,coder=return_to_go+grpo,*=rae`; default: `baseline` for all."""
    agents: str | None = None
    """Comma-separated agents whose calls are trained; default: all."""
    policies: str | None = None
    """Comma-separated policies whose calls are trained; default: all."""
    choices: str = "used"
    """Which of several answers to one request (n > 1) are trained: `used` (the agent continued with them) or `all`."""
    filter: str | None = None
    """`module:function(StoredRollout) -> bool` that selects the rollouts to train on; default: all."""
    split: str = "recorded"
    """Which tasks are for training: `recorded`, `all`, or a share such as 0.9.

    A share selects tasks by a hash of the task id."""
    admit: str | None = None
    """Comma-separated reasons that do not exclude a call: `unstated_sampling`, `unsigned`, `untrusted_reward`,
    `untrusted`; default: none.

    `unstated_sampling`: a client recorded the call without temperature, top_p and constraints. Admit it if the server's
    defaults are 1, 1 and none.
    `unsigned`: the caller named a rollout without its runner's signature. Admit it if the policy server cannot have the
    runner's key.
    `untrusted_reward`: a process without the tokens rewarded a rollout that no runner began.
    `untrusted`: the agent's side recorded the call."""
    max_staleness: int | None = None
    """Drop calls more than this many versions older than the newest; default: no limit."""
    max_tokens: int | None = None
    """Drop calls with more tokens in prompt and completion; default: no limit.

    Calls are never cut."""
    settle_s: float = 60.0
    """Seconds of silence after which an incomplete rollout counts as `unfinished`."""
    wait_s: float = 0.0
    """How long to wait for rollouts that are still arriving."""
    group_wait_s: float = 300.0
    """How long a task's group waits for rollouts that its runner has not finished.

    It is counted from the group's last activity; the group is then used as it is. The default is twice the runner's timeout
    plus a minute."""
    min_coverage: float = 0.5
    """Minimum share of calls that must be trainable; below it the command fails."""
    keep_zero_spread: bool = False
    """Keep groups whose rewards are all equal; their advantage is 0."""


@dataclass(frozen=True, slots=True)
class SftSettings:
    """`[sft]`: conversations in, a model to start from out."""

    model: str | None = None
    """Model directory or Hugging Face id to start from; default: `[train] model`, else the model last served."""
    chat_template: str | None = None
    """Jinja file with the chat template to train and serve with; default: the model's own.

    It is saved with the result, so that `trainspan serve` renders conversations in the same way."""
    loss_on: str = "assistant"
    """Tokens in the loss: `assistant` (the model's answers, each with the token that ends it) or `all`."""
    epochs: float = 3.0
    """Number of passes over the conversations."""
    max_steps: int | None = None
    """Number of optimizer steps, whatever the number of passes; default: `epochs` decides."""
    batch_tokens: int | None = None
    """Tokens in the loss of one optimizer step, about; default: a 32nd of an epoch, at least 256 and at most 16384.

    Conversations are never split between steps."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW; default: 2e-4 up to 135 million weights, falling to 1e-5 at a billion; ten times that for
    an adapter."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises from 0."""
    decay: str = "cosine"
    """Learning rate after that: `constant`, or `linear` or `cosine` decay to a tenth of it."""
    weight_decay: float = 0.0
    """Weight decay of AdamW; norms and biases are excluded."""
    max_grad_norm: float = 1.0
    """Norm to which a larger gradient is clipped."""
    max_tokens: int | None = None
    """Greatest number of tokens of a call, prompt and answer; default: the model's context."""
    too_long: str = "drop"
    """What happens to a longer call: `drop`, or `cut` (train the beginning of its answer). Both are counted."""
    eval_fraction: float = 0.05
    """Share of the conversations that is held out for the evaluation loss.

    Conversations with the same first prompt are held out together."""
    eval_every: int | None = None
    """Steps between evaluations; default: one per epoch."""
    save_every_s: float = 300.0
    """Seconds between saved states, from which a job that was stopped continues; 0: after each step."""
    adapter: str = "none"
    """`none` (train all weights) or `lora` (train a low-rank adapter on frozen weights)."""
    lora_rank: int | None = None
    """Rank of the adapter; default: 16."""
    lora_alpha: float | None = None
    """The adapter's output is scaled by alpha / rank; default: twice the rank."""
    lora_targets: str | None = None
    """Comma-separated names of the adapted modules; default: all linear layers except the output head."""
    lora_result: str = "merged"
    """The result with `adapter = "lora"`: `merged` (a whole model) or `adapter` (the adapter alone, to be served on its base).

    Only a whole model can be the start of `trainspan train` and `trainspan loop`."""
    dtype: str | None = None
    """Data type of the computation: `float32` or `bfloat16` (autocast); default: bfloat16 on a GPU, else float32.

    Trained weights, gradients and Adam's moments are float32 in both cases."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of keeping them; default: on a GPU only."""
    memory_gib: float | None = None
    """Memory that the training may use on its device; default: the memory that is free at its start."""
    micro_batch_tokens: int | None = None
    """Maximum number of tokens in one forward pass, padding included; default: 16384, or as many as fit into memory."""
    forward: str = "auto"
    """`padded`, `packed` (rows one after another, no padding), `tree` (shared prefixes are forwarded once), or `auto` (the
    cheapest)."""
    seed: int = 0
    """Seed for the order of conversations, the held-out share and a new adapter."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """`[train]`: Parquet in, checkpoints out."""

    model: str | None = None
    """Model directory or Hugging Face id to start from if there is no checkpoint yet; default: the model last served."""
    checkpoints: str | None = None
    """Folder of checkpoints; default: `$TRAINSPAN_HOME/checkpoints`.

    The policy server must see the same folder."""
    policy_url: str = "http://127.0.0.1:8000"
    """Policy server to swap after each round; `none` only writes checkpoints."""
    publish_timeout_s: float = 300.0
    """How long a swap is retried while the server is busy, or unavailable after it was reached in the same round."""
    learning_rate: float | None = None
    """Learning rate of AdamW; default: 2e-5 up to 135 million weights, falling to 1e-6 at a billion; ten times that for an
    adapter.

    `metrics.jsonl` and the round's event name the rate that was used."""
    warmup_rounds: int = 0
    """Rounds of a run over which the learning rate rises from 0."""
    decay: str = "constant"
    """Learning rate after that: `constant`, or `linear` or `cosine` decay to a tenth of it at `decay_rounds`, then constant."""
    decay_rounds: int | None = None
    """Round of a run at which decay ends; default: none, required by `linear` and `cosine`."""
    weight_decay: float = 0.0
    """Weight decay of AdamW; norms and biases are excluded."""
    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients per step."""
    adam_beta2: float = 0.999
    """Decay of Adam's mean of squared gradients per step; 0.95 to 0.99 follows gradients of changing size faster."""
    steps_per_round: int = 4
    """Optimizer steps per round; rollouts are split among them whole.

    More steps learn more from a round and move further from its data."""
    loss: str = "clip"
    """`clip` (PPO's surrogate with a clipped ratio) or `cispo` (a capped ratio, and every token gives a gradient).

    `cispo` is for rare but important tokens."""
    epsilon: float | None = None
    """Lower clip of the importance ratio, 1 − ε; default: 0.2, or 3e-4 with `ratio = "call"`.

    It cannot be set with `cispo`."""
    epsilon_high: float | None = None
    """Upper clip of the importance ratio, 1 + ε, or with `cispo` the cap itself; default: 0.28, or 4e-4 with
    `ratio = "call"`, or 5 with `cispo`.

    The higher upper side keeps exploration."""
    ratio: str = "token"
    """Unit of the importance ratio: `token`, or `call` (geometric mean over a call's tokens, as in GSPO).

    `call` is for long answers and mixtures of experts."""
    weights: str = "rollout"
    """Weights of tokens: `rollout` (mean over rollouts of the mean over their tokens), `token` (mean over tokens), `const`,
    or `module:function`.

    With `token`, long rollouts count more. With `const`, sums are divided by `const_tokens`, as in Dr. GRPO."""
    const_tokens: int | None = None
    """With `weights = "const"`: divisor of the sum over each rollout, whatever its length; default: none, required by
    `const`."""
    kl_coef: float = 0.0
    """Coefficient of the KL divergence to the model that the run started from, in the loss.

    If it is not 0, that model is loaded as well (except with LoRA), and each row is forwarded once more."""
    old_policy: str | None = None
    """Denominator of the ratio: `logged` (the sampler) or `recompute` (the policy at the round's start); default: chosen by
    round.

    `logged` is chosen if all calls are of the current version and both server and trainer compute in float32."""
    correction: str | None = None
    """With `recompute`: weight of a token by w = π_old/π_sampler: `truncate` (min(w, cap)), `mask` (w within 1/cap … cap,
    else 0) or `none`; default: `truncate`."""
    correction_cap: float | None = None
    """Cap of `correction`; default: 2."""
    reject_ratio: float | None = None
    """With `recompute`: drop calls whose geometric mean of w is outside 1/x … x; default: none are dropped.

    Values of 1.05 to 1.5 are usual."""
    max_staleness: int | None = None
    """Do not train calls that are more versions behind than this; default: no limit."""
    adapter: str = "none"
    """`none` (train all weights) or `lora` (train a low-rank adapter on frozen weights).

    An adapter takes a fraction of the memory and has small checkpoints."""
    lora_rank: int | None = None
    """Rank of the adapter; default: 16.

    The server's `max_lora_rank` must allow it."""
    lora_alpha: float | None = None
    """The adapter's output is scaled by alpha / rank; default: twice the rank."""
    lora_targets: str | None = None
    """Comma-separated names of the adapted modules; default: all linear layers except the output head."""
    max_grad_norm: float = 1.0
    """Norm to which a larger gradient is clipped."""
    dtype: str | None = None
    """Data type of the computation: `float32` or `bfloat16` (autocast); default: bfloat16 on a GPU, else float32.

    Trained weights, gradients and Adam's moments are float32 in both cases."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of keeping them; default: on a GPU only."""
    memory_gib: float | None = None
    """Memory that the trainer may use on its device; default: the memory that is free at its start.

    The memory estimate is compared with it before anything is loaded."""
    micro_batch_tokens: int | None = None
    """Maximum number of tokens in one forward pass, padding included; default: 16384, or as many as fit into memory.

    Set it if runs must be bit-identical on machines with different amounts of free memory."""
    merge: bool = True
    """Merge the calls of a segment into one row, so that each token is forwarded once per rollout."""
    forward: str = "auto"
    """`padded`, `packed` (rows one after another, no padding), `tree` (shared prefixes are forwarded once), or `auto` (the
    cheapest)."""
    max_kl: float = 0.5
    """Limit of k3 against the ratio's other policy; beyond it the round ends and the previous policy stays."""
    max_ratio: float = 1000.0
    """The same for the largest importance ratio of a token."""
    max_loss: float = 100.0
    """The same for the absolute value of a step's loss."""
    engine_mismatch: float | None = None
    """Alarm threshold of the mean |Δ log-probability| between server and trainer; default: 3e-5 if both compute in float32,
    else 0.1.

    It is measured at the first step of a round on fresh data. The threshold of k3 is its square."""
    keep_checkpoints: int = 5
    """Number of newest checkpoints kept on disk.

    `latest`, its parent and the served checkpoint are always kept."""
    token_figures_mib: float = 64.0
    """Maximum MiB of per-token figures that a round writes (17 bytes a token, before compression); 0: none are written.

    They are the trainer's log-probability, entropy, ratio and clip of each trained token, for `trainspan view`."""
    report_to: str = "none"
    """Trackers of each round's figures in addition to `metrics.jsonl`: `tensorboard`, `trackio`, `wandb`, several with
    commas, or `none`."""
    seed: int = 0
    """Seed for the order of rollouts and for a new adapter."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`[loop]`: all stages, supervised."""

    rounds: int = 20
    """Maximum number of rounds."""
    target: str | None = None
    """The agent: `module:function`, `file.py:function`, or a command line; default: none, required by the loop."""
    tasks_per_round: int = 32
    """Training tasks drawn for each round; each is rolled out `[rollouts] n` times."""
    eval_tasks: int = 500
    """Validation tasks before the first and after the last round; 0: none."""
    val_tasks: int = 100
    """Validation tasks in between."""
    eval_every: int = 5
    """Rounds between validations; 0: only at the start and the end."""
    eval_n: int = 1
    """Rollouts per validation task; several give pass@k in addition to the mean."""
    success_reward: float = 1.0
    """Minimum reward of a rollout that counts as solved in pass@k."""
    stop_at: float | None = None
    """End the run when a validation reaches this mean reward; default: never."""
    patience: int | None = None
    """End the run after this many validations without a better one; default: never."""
    max_hours: float | None = None
    """End the run after this many hours of rounds and validations; default: never."""
    keep_best: bool = True
    """Keep the checkpoint of the best validation in the run's folder `best/`, regardless of pruning."""
    probe_tasks: str | None = None
    """Task file of a hard probe, rolled out before and after and reported under its own name; default: none.

    It is never trained on."""
    server_devices: str | None = None
    """GPUs of the policy server, such as `0` or `0,1`; default: the first.

    They are numbered among the visible ones. The server splits the model over several (tensor parallelism)."""
    server_flags: str | None = None
    """Further flags of vLLM, such as `--gpu-memory-utilization 0.3`; default: none.

    On a shared GPU the server's share of memory is 0.4 unless a flag sets it."""
    trainer_devices: str | None = None
    """GPUs of the trainer, one process on each; default: all but the server's, or the only one."""
    trainer_processes: int | None = None
    """Processes of the trainer if there is no GPU; default: 1."""
    trainer_launch: str | None = None
    """Command that launches the trainer's processes, such as `accelerate launch --config_file fsdp.yaml`; default:
    `torchrun` for several."""
    restarts: int = 3
    """Maximum number of restarts of each process that exits unexpectedly."""
    ready_timeout_s: float = 600.0
    """How long to wait for the collector, the policy server and the trainer to become ready."""
    seed: int = 0
    """Seed for drawing tasks."""


@dataclass(frozen=True, slots=True)
class ViewSettings:
    """`[view]`: pages about what is stored."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8088
    """Port to listen on; 0: any free one."""
    allowed_hosts: str = ""
    """Comma-separated names that are accepted in the Host header of a request.

    They are in addition to localhost, this machine's own name and `host`. Addresses are always accepted."""
    token_file: str | None = None
    """TOML file with the tokens of the roles reader and runner, either of which opens the pages; default:
    `$TRAINSPAN_HOME/tokens.toml`."""
    open_to_all: bool = False
    """Require no token: every user of this machine can then read everything, and nobody can write notes. Only for loopback
    addresses."""
    read_only: bool = False
    """Take no notes."""
    tls_cert: str | None = None
    """PEM certificate chain of the server; default: no TLS."""
    tls_key: str | None = None
    """PEM key of `tls_cert`; default: no TLS."""
    insecure_allow_remote: bool = False
    """Listen without TLS on an address that other machines can reach."""
    patience_ms: int = 200
    """Milliseconds after which a browser gets a page that says what it waits for, and loads the rest by itself."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All sections of `trainspan.toml`."""

    collector: CollectorSettings = field(default_factory=CollectorSettings)
    serving: ServingSettings = field(default_factory=ServingSettings)
    rollouts: RolloutsSettings = field(default_factory=RolloutsSettings)
    dataset: DatasetSettings = field(default_factory=DatasetSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    view: ViewSettings = field(default_factory=ViewSettings)

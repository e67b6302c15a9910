"""Settings of what agents run on: the policy server, the runner, and a cluster."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from trainspan_schemas.config.marks import Advanced

__all__ = ["RaySettings", "RolloutsSettings", "ServingSettings", "Stdin"]

Stdin: TypeAlias = Literal["none", "task"]
"""What a command agent's standard input is: nothing, or its task as JSON."""


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """`[serving]`: the policy server."""

    model: str | None = None
    """Model directory or Hugging Face id; default: the newest checkpoint."""
    checkpoints: str | None = None
    """Folder of checkpoints that may be swapped in; default: `$TRAINSPAN_HOME/checkpoints`."""
    checkpoints_url: str | None = None
    """URL from which checkpoints are copied into `checkpoints`: that of `[train]`, or where a web server shows its folder; default:
    `checkpoints` is shared with the trainer.

    The server then swaps to the last accepted checkpoint before it listens, and nothing else may be in `checkpoints`."""
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
    """OTLP/gRPC endpoint for call spans, or several with commas; `none` turns off their export; default: `[collector] endpoints`."""
    token_file: str | None = None
    """Role tokens of the collector; default: those of the collector on this machine.

    The server sends the token of the role serving.
    If there is no collector on this machine, the headers in OTEL_EXPORTER_OTLP_HEADERS are sent."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: `cpu`, `cuda`, or `auto`, the one that the installed vLLM is built for.

    With `auto`, a vLLM for CPUs refuses to start where a GPU is."""
    dtype: str | None = None
    """Data type of the weights; default: float32 on a CPU, bfloat16 on a GPU."""
    max_model_len: int | None = None
    """Context length in tokens; default: the model's own."""
    max_lora_rank: int | None = None
    """Serve LoRA adapters up to this rank; default: the rank of `[model]` or of the served adapter, else no adapters."""
    merge_adapters: Advanced[bool | None] = None
    """Add a LoRA adapter to the full weights at each swap instead of computing it next to them; default: on a CPU with one
    policy in float32, where it is faster.

    Adapters of any rank are then served, and a swap holds requests while it loads. Not for quantized weights, and not for
    bfloat16, where rounding loses most of a small update."""
    signing_key_file: str | None = None
    """The runner's key, which proves that an identity or URL is the runner's; default: `$TRAINSPAN_HOME/signing-key`."""
    require_signature: bool = False
    """Answer only requests whose identity or URL the runner signed; others get 401."""
    sleep: bool = False
    """Let a trainer on the same GPU put the server to sleep and use its memory in the meantime."""
    train_sampling: bool = False
    """Sample training rollouts at temperature 1 without truncation, whatever the client asks for.

    It overrides the temperature, top_p and top_k of the request."""
    val_temperature: float | None = None
    """Sample validation rollouts at this temperature without truncation; 0: greedy; default: as the client asks."""
    strict_tools: bool = True
    """Make calls of tools with `strict: true` follow the tool's schema, as vLLM does by default; false samples them freely."""
    body_timeout_s: Advanced[float] = 60.0
    """How long the body of a request may take to arrive before the request gets 408."""
    max_body_bytes: Advanced[int] = 64 * 1024 * 1024
    """Maximum size of a request's body; a longer one gets 413.

    If the length is announced, the answer comes before the body is read."""
    swap_timeout_s: Advanced[float] = 30.0
    """How long a request is held during a swap before it gets 503 with Retry-After."""
    drain_timeout_s: Advanced[float] = 60.0
    """How long a swap or a sleep request waits for running generations before it ends them.

    Their clients get 503, or an error event in a stream.
    Raise it together with `swap_timeout_s` if answers take longer."""
    swap_in_flight: bool = False
    """Let requests in progress go on across a swap of full weights instead of waiting for them, for long answers.

    They stop after a token, and continue with the new weights once these are loaded. Each call's span says which tokens are
    of which version. Requests with a LoRA adapter that is not merged keep it until they end, with or without this."""
    canary_tolerance: Advanced[float | None] = None
    """Maximum mean |Δ log-probability| between server and trainer at a swap; default: 1e-4 in float32, else 0.2.

    The float32 default applies to each token, and only if both compute in float32; otherwise the mean counts."""


@dataclass(frozen=True, slots=True)
class RolloutsSettings:
    """`[rollouts]`: tasks in, agent executions out."""

    tasks: str | None = None
    """Task file: JSON Lines, CSV or Parquet; default: none.

    `trainspan rollout --tasks -` reads JSON lines from standard input, and begins the rollouts of a task as it arrives."""
    harness: str | None = None
    """Coding harness that is the agent: a built-in connection, such as `codex`, or the path of one's own (`NAME.toml`); default: none.

    The target is then further arguments of the harness ([harnesses.md](harnesses.md))."""
    workspace: str | None = None
    """Template of a harness's work folder: a folder, or a git repository as `URL#REVISION`; default: an empty folder.

    It may have `{id}` and the fields of the task's input, so that each task has a template of its own."""
    keep_workspaces: str | None = None
    """Folder in which home and work folder of each attempt are kept, as `ROLLOUT-ATTEMPT`; default: they are removed after the verdict."""
    stdin: Stdin | None = None
    """What a command finds on its standard input: its task as JSON, or nothing; default: `task`, for a harness as its connection says."""
    n: int = 8
    """Rollouts per task."""
    concurrency: int = 16
    """Maximum number of rollouts in progress."""
    engine: Literal["local", "ray"] = "local"
    """Where agents run: `local`, on this machine, or `ray`, on the nodes of a Ray cluster (see `[ray]`)."""
    workers: int | None = None
    """Worker processes for a `module:function` target; default: 1, with the engine `ray` one per CPU of the cluster.

    With the engine `ray` they are Ray actors, which run commands too; each takes an equal part of `concurrency`. By default
    shards divide the CPUs, and there are more workers as nodes join the cluster."""
    python: str | None = None
    """Python of these processes, such as `agent-env/bin/python`; default: the runner's own.

    trainspan must be installed in its environment. It is for agents whose packages do not fit next to the trainer's."""
    timeout_s: float = 120.0
    """Seconds after which a rollout is stopped with status `timeout`."""
    retries: int = 1
    """Further attempts after an infrastructure failure."""
    allow_no_calls: bool = False
    """Let a rollout be `ok` of which the policy server got no signed call; without it that is an `infra_error`.

    An agent that talks to another model, or passes on only a part of its base URL, would otherwise seem to work."""
    deliver_timeout_s: Advanced[float] = 60.0
    """Seconds that a finished run waits for an unavailable collector before it fails.

    `--resume` then sends its verdicts."""
    judge: str | None = None
    """What gives the reward: `module:function`, a rubric `FILE.toml`, a grader `FILE.json`, or `exact`, `numeric`, `regex`,
    `json_schema`, `sql`, `tests` or `tool_call` with the task's field, such as `exact:answer`; default: the agent's own evaluations count.

    docs/rewards.md shows each of them."""
    judge_concurrency: Advanced[int] = 16
    """Maximum number of verdicts in progress.

    Judges run in threads, or in one event loop if the judge is an `async def`, while agents keep running."""
    judge_timeout_s: float = 120.0
    """Seconds after which a verdict is abandoned and its rollout gets status `judge_error`."""
    policy_url: str = "http://127.0.0.1:8000/v1"
    """Base URL of the policy, passed to agents as OPENAI_BASE_URL; default: that of `[serving] host` and `port`.

    Agents of the loop get the address of its own policy server instead if that listens on a loopback address."""
    policy_servers: tuple[str, ...] = ()
    """URLs of the policy servers behind `policy_url`, if that is a balancer, or of one on another machine.

    Branches are registered at each of them; the loop swaps all of them and starts none itself. With one, agents of the loop
    use it unless `policy_url` is set."""
    collector: str = "http://127.0.0.1:4317"
    """OTLP/gRPC endpoint for the spans of the runner and its agents, or several with commas; default: `[collector] endpoints`."""
    signing_key_file: str | None = None
    """Key that signs identities and URLs; default: `$TRAINSPAN_HOME/signing-key`.

    The default file is created if it does not exist. A policy server with another state folder needs a copy."""
    token_file: str | None = None
    """Role tokens of the collector; default: those of the collector on this machine.

    The runner sends the token of the role runner, and its agents get that of the role agent.
    If there is no collector on this machine, the headers in OTEL_EXPORTER_OTLP_HEADERS are sent."""


@dataclass(frozen=True, slots=True)
class RaySettings:
    """`[ray]`: the Ray cluster of commands that run with the engine `ray`."""

    address: str | None = None
    """HOST:PORT of the cluster's head; default: RAY_ADDRESS, otherwise the cluster that this machine is a node of.

    The command itself runs on a node of the cluster."""
    working_dir: str | None = None
    """Folder with the code of agents, reward functions and filters, copied to the nodes; default: the nodes have the code.

    The state folder, task files, the files of keys and tokens that any setting names, and files that hold a private key or
    tokens of trainspan are not copied."""
    runtime_env: str | None = None
    """JSON file with further fields of Ray's runtime environment, such as `pip` or `env_vars`; default: none.

    Ray shows these fields in its dashboard and logs: they are no place for secrets."""
    worker_cpus: float = 1.0
    """CPUs that each worker, or each task of a dataset, reserves on its node."""
    worker_resource: Advanced[str | None] = None
    """Custom resource of the nodes that may be used, as in `ray start --resources`; default: any node."""
    start_timeout_s: Advanced[float] = 120.0
    """How long the command waits for a worker if the cluster has room for none."""

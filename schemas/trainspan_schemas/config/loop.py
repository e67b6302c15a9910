"""Settings of the loop and of the viewer."""

from dataclasses import dataclass
from typing import Literal

from trainspan_schemas.config.marks import Advanced

__all__ = ["LoopSettings", "ViewSettings"]


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`[loop]`: all stages, supervised."""

    rounds: int = 20
    """Maximum number of rounds."""
    target: str | None = None
    """The agent: `module:function`, `file.py:function`, or a command line; default: the harness of `[rollouts]`, else none: the loop
    learns from agents that others run.

    With a harness it is further arguments of that."""
    val_target: str | None = None
    """The agent of validations if there is no `target`; default: none, no validations."""
    live_rewards: int = 64
    """Without a target: number of new rewards that make a round."""
    live_wait_s: float = 600.0
    """Without a target: seconds after which a round takes fewer rewards, but at least one."""
    live_feedback_s: Advanced[float] = 3600.0
    """Without a target: seconds from a rollout's first span in which its reward may arrive; later ones may be left out."""
    tasks_per_round: int = 32
    """Training tasks drawn for each round; each is rolled out `[rollouts] n` times."""
    mode: Literal["rounds", "stream"] = "rounds"
    """`rounds` (each round has its own rollouts) or `stream` (a constant number of rollouts is in progress, and complete
    groups are trained as soon as there are `tasks_per_round`)."""
    overlap: int = 0
    """Number of rounds by which rollouts may run ahead of training; 0: rollouts and training take turns.

    With 1, the agents work on the next round while the trainer learns from this one; a call is then up to 1 version
    behind when it is trained. A stream pauses while so many rounds' groups wait for training; there, 0 counts as 1. It cannot be
    combined with `[serving] sleep`."""
    eval_tasks: int = 500
    """Validation tasks before the first and after the last round; 0: none."""
    val_tasks: int = 100
    """Validation tasks in between."""
    eval_every: int = 5
    """Rounds between validations; 0: only at the start and the end."""
    eval_n: int = 1
    """Rollouts per validation task; several give pass@k in addition to the mean."""
    success_reward: Advanced[float] = 1.0
    """Minimum reward of a rollout that counts as solved in pass@k."""
    stop_at: float | None = None
    """End the run when a validation reaches this mean reward; default: never."""
    patience: int | None = None
    """End the run after this many validations without a better one; default: never."""
    max_hours: float | None = None
    """End the run after this many hours of rounds and validations; default: never."""
    probe_tasks: str | None = None
    """Task file of a hard probe, rolled out before and after and reported under its own name; default: none.

    It is never trained on."""
    policies_in_turn: Advanced[bool] = False
    """Train the policies of `[policies.NAME]` one after the other instead of at the same time; always with `[serving] sleep`.

    It takes less memory at a time."""
    trial_tasks: str | None = None
    """Task file (split `val`) on which each new version is compared with the one before, right after its swap; default: none.

    A version that is worse is refused: the one before goes back in service. The tasks are never trained on."""
    trial_n: int = 1
    """Rollouts of each trial task under each version."""
    trial_level: Advanced[float] = 0.05
    """Greatest probability of refusing a version that is as good as the one before."""
    server_devices: str | None = None
    """GPUs of the policy server, such as `0` or `0,1`; default: the first.

    They are numbered among the visible ones. The server splits the model over several (tensor parallelism)."""
    server_flags: str | None = None
    """Further flags of vLLM, such as `--gpu-memory-utilization 0.3`; default: none.

    On a shared GPU the server's share of memory is 0.4 unless a flag sets it."""
    trainer_devices: str | None = None
    """GPUs of the trainer, one process on each; default: all but the server's, or the only one."""
    trainer_processes: Advanced[int | None] = None
    """Processes of the trainer if there is no GPU; default: 1."""
    trainer_launch: str | None = None
    """Command that launches the trainer's processes, such as `accelerate launch --config_file fsdp.yaml`; default:
    `torchrun` for several."""
    ready_timeout_s: Advanced[float] = 600.0
    """How long to wait for the collector, the policy server and the trainer to become ready.

    The loop waits as long for a store or policy server that stops answering, for example because it is moved or restarts."""
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
    """Require no token: every user of this machine can then read everything, and nobody can give labels. Only for loopback
    addresses."""
    read_only: bool = False
    """Take no labels."""
    tls_cert: str | None = None
    """PEM certificate chain of the server; default: no TLS."""
    tls_key: str | None = None
    """PEM key of `tls_cert`; default: no TLS."""
    insecure_allow_remote: bool = False
    """Listen without TLS on an address that other machines can reach."""
    page_wait_ms: Advanced[int] = 200
    """Milliseconds after which a browser gets a page that says what it waits for, and loads the rest by itself."""

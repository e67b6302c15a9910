"""The settings of a run."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from trainspan_schemas.artifacts.branches import BranchSource
from trainspan_schemas.config.agents import RaySettings, Stdin
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry.identity import Split

__all__ = ["RunSettings", "Shard"]

_SHARD = re.compile(r"(\d{1,6})/(\d{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal parts of a run's tasks: those at the positions `index`, `index + count` and so on."""

    index: int
    """From 0."""
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Parses `i/n`. Raises UsageError."""
        match = _SHARD.fullmatch(text.strip())
        if match is None or not int(match[1]) < int(match[2]):
            raise UsageError(f"--shard {text}: it must be i/n, with i from 0 to n-1, such as 0/8")
        return cls(int(match[1]), int(match[2]))

    def size(self, tasks: int) -> int:
        """The number of tasks of this shard, of all `tasks`."""
        return len(range(self.index, tasks, self.count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run."""

    tasks: Path
    """Task file; `-` is standard input, whose lines are tasks as they arrive, each in its own `round` if it names one."""
    target: tuple[str, ...]
    """One `module:function`, or a command and its arguments; further arguments of the `harness`, if there is one."""
    run_id: str
    allow_no_calls: bool = False
    """Whether a rollout of which the policy servers began no call may be `ok`."""
    harness: str | None = None
    """Name or file of the connection of a coding harness."""
    workspace: str | None = None
    """Template of a harness's work folder."""
    keep_workspaces: str | None = None
    """Folder in which homes and work folders are kept."""
    stdin: Stdin | None = None
    """Of commands; None: as the harness's connection says, else the task."""
    n: int = 8
    split: Split | None = None
    """Label of the rollouts; tasks marked for the other split are skipped. None: each task's own, otherwise train."""
    limit: int | None = None
    """Maximum number of these tasks, from the first; None: all."""
    shard: Shard = Shard(0, 1)
    """The part of these tasks that this process runs, with all rollouts of each."""
    round: int = 0
    concurrency: int = 16
    engine: str = "local"
    """`local` or `ray`."""
    ray: RaySettings = field(default_factory=RaySettings)
    workers: int | None = None
    """None: 1, or one per CPU of the Ray cluster, divided among shards."""
    python: str | None = None
    """Python of the workers; None: this one."""
    timeout_s: float = 120.0
    retries: int = 1
    deliver_timeout_s: float = 60.0
    """How long the run waits at its end for an unreachable collector."""
    judge: str | None = None
    judge_concurrency: int = 16
    """Concurrent verdicts, in addition to the `concurrency` agents."""
    judge_timeout_s: float = 120.0
    max_reward: float = 1e6
    """Scores beyond it, in either direction, are not used; `[advanced] dataset.max_reward`."""
    policy_url: str = "http://127.0.0.1:8000/v1"
    policy_servers: tuple[str, ...] = ()
    """The servers behind `policy_url`, if that is a balancer."""
    collector: str = "http://127.0.0.1:4317"
    """One URL, or several with commas."""
    token_file: str | None = None
    """The collector's role tokens; None: those of the collector on this machine, otherwise the runner sends
    OTEL_EXPORTER_OTLP_HEADERS."""
    store: str | None = None
    """The collector's store; a file next to it lists the tokens it requires. None: the default store."""
    signing_key_file: str | None = None
    """Key that signs identities and URLs; None: `$TRAINSPAN_HOME/signing-key`."""
    resume: bool = False
    """Resume this run and round: finished rollouts are not repeated."""
    branches: BranchSource | None = None
    """The rollouts are branches of stored ones: `tasks` is a file of branch points (artifacts/branches.py)."""

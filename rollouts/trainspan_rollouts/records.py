"""The input and output of a run: settings, progress and result."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainspan_schemas.artifacts.branches import BranchSource
from trainspan_schemas.config.agents import RaySettings
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry.identity import Split

__all__ = ["REPEATED", "Progress", "RunResult", "RunSettings", "Shard"]

REPEATED: Final = frozenset({"infra_error", "cancelled"})
"""Final statuses that a resumed run repeats."""

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
    """One `module:function`, or a command and its arguments."""
    run_id: str
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


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run."""

    done: int
    failed: int
    """Done with a status other than `ok`."""
    total: int
    """So far, if tasks arrive on standard input."""
    mean_reward: float | None
    groups: int
    """Tasks of which all rollouts are done."""
    oldest_round: int | None
    """The first round with a task of which some are not done; None if there is none."""
    status: dict[str, int]
    """Final status → rollouts."""
    rewarded: int
    """Rollouts with a reward."""
    calls: int
    """Model calls of all attempts: successful ones as reported by the agents, at most those that the policy servers began."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run."""

    run_id: str
    round: int
    split: Split | None
    total: int
    status: dict[str, int]
    """Final status → rollouts."""
    mean_reward: float | None
    """Over the rollouts with a reward."""
    rewarded: int
    calls: int
    """Successful model calls of all attempts, as reported by the agents."""
    seconds: float
    unacknowledged: int
    """Rollouts with a verdict that the collector has not acknowledged; resume the run to send them."""
    resumed: int = 0
    """Rollouts that an earlier process of the run had finished, included in the total."""
    uncounted: int = 0
    """Attempts whose agents ended before they could report their calls."""

    @property
    def unfinished(self) -> int:
        """Rollouts and verdicts that the same command with `resume` repeats or sends."""
        return self.unacknowledged + sum(self.status.get(status, 0) for status in REPEATED)

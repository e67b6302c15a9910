"""What a run is told, and what it tells: settings in, progress and result out."""

from dataclasses import dataclass
from pathlib import Path

from trainspan_schemas.identity import Split

__all__ = ["Progress", "RunResult", "RunSettings"]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What to run, and how."""

    tasks: Path
    target: tuple[str, ...]
    """One `module:function`, or a command and its arguments."""
    run_id: str
    n: int = 8
    split: Split | None = None
    """Label of the rollouts; tasks marked for the other split are left out. None: each task's own, else train."""
    limit: int | None = None
    """Only the first so many of these tasks; None: all."""
    round: int = 0
    concurrency: int = 16
    workers: int = 1
    timeout_s: float = 120.0
    retries: int = 1
    deliver_timeout_s: float = 60.0
    """How long the run waits at its end for a collector that is away."""
    judge: str | None = None
    judge_concurrency: int = 16
    """Verdicts under way at once, beside the `concurrency` agents."""
    judge_timeout_s: float = 120.0
    policy_url: str = "http://127.0.0.1:8000/v1"
    collector: str = "http://127.0.0.1:4317"
    token_file: str | None = None
    """The collector's role tokens; None: those of the collector on this machine, else the runner sends what
    OTEL_EXPORTER_OTLP_HEADERS says."""
    store: str | None = None
    """The collector's store, beside which it says which tokens it asks for; None: the default one."""
    signing_key_file: str | None = None
    """What identities and URLs are signed with; None: `$TRAINSPAN_HOME/signing-key`."""
    resume: bool = False
    """Go on with this run and round: what is finished is not repeated."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    done: int
    failed: int
    """Of those done, the ones whose status is not `ok`."""
    total: int
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to."""

    run_id: str
    round: int
    split: Split | None
    total: int
    status: dict[str, int]
    """Final status → rollouts."""
    mean_reward: float | None
    """Over the rollouts that have a reward."""
    rewarded: int
    calls: int
    """Model calls that succeeded, of all attempts, as far as the agents could tell."""
    seconds: float
    unacknowledged: int
    """Rollouts whose verdict the collector has not acknowledged; the run can be resumed to send them."""
    resumed: int = 0
    """Of all rollouts, those that an earlier life of the run had finished."""

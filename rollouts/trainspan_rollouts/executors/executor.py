"""The interface of all executors: an `Execution` in, an `Ended` out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainspan_rollouts.harnesses.connection import Connection
from trainspan_rollouts.task_file import Task
from trainspan_schemas.agents.worker import AgentReport
from trainspan_schemas.config.agents import Stdin
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.telemetry.identity import Identity, TraceParent
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["AgentSpec", "Ended", "Execution", "Executor"]


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What an executor runs, the same on each machine."""

    target: tuple[str, ...]
    """One `module:function`, or a command and its arguments, or further arguments of the harness."""
    policy_url: str
    collectors: Collectors
    timeout_s: float
    workers: int
    """Processes for a function."""
    python: str | None
    """Python of these processes; None: the executor's own."""
    harness: Connection | None = None
    workspace: str | None = None
    """Template of a harness's work folder."""
    keep_workspaces: str | None = None
    """Folder in which homes and work folders stay."""
    stdin: Stdin = "task"
    otlp_http: Mapping[str, str] = field(default_factory=dict)
    """OTLP/gRPC URL of each collector → its OTLP/HTTP URL."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One attempt of the agent at one task."""

    task: Task
    identity: Identity
    """Signed."""
    parent: TraceParent
    """The rollout's span."""
    url_token: str
    """The token that names the rollout in a base URL: the parent with its signature."""
    answered_s: float = 0.0
    """Seconds that answers took which are repeated at once. They count as spent, or branches would have more time than their rollout."""

    def time_left(self, timeout_s: float) -> float:
        """Seconds after which the agent is stopped."""
        return max(0.0, timeout_s - self.answered_s)


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of an execution."""

    status: RolloutStatus
    duration_s: float
    value: Any = None
    """The function's return value."""
    stdout_tail: str = ""
    """The end of a command's output."""
    exit_code: int | None = None
    error: str | None = None
    """One line."""
    report: AgentReport | None = None
    """The report of the agent's process; None if there is none."""
    asks_again: bool = False
    """Only the agent says that the failure was not its own: it is tried again, and counts as the agent's in the end."""
    blameless: bool = False
    """Another rollout's hang ended this one: the next attempt does not count as a retry."""
    workdir: Path | None = None
    """A harness's work folder on this machine, until it is released."""


class Executor(Protocol):
    """Executes agents; `execute` may be called concurrently."""

    async def start(self) -> None:
        """Gets ready. Raises UsageError or ProcessError if the target cannot be executed."""

    async def execute(self, execution: Execution) -> Ended:
        """Executes the agent once, within the timeout; a canceled call ends the agent."""
        ...

    async def release(self, execution: Execution) -> None:
        """Removes what an execution that has ended left for the judge."""

    async def close(self) -> None:
        """Ends all processes, giving them a moment to send their spans."""

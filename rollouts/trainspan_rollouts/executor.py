"""What the ways to execute an agent have in common: an execution goes in, how it ended comes out."""

from dataclasses import dataclass
from typing import Any, Protocol

from trainspan_rollouts.task_file import Task
from trainspan_schemas.identity import Identity, TraceParent
from trainspan_schemas.status import RolloutStatus
from trainspan_schemas.worker import AgentReport

__all__ = ["Ended", "Execution", "Executor"]


@dataclass(frozen=True, slots=True)
class Execution:
    """One attempt to let the agent do one task."""

    task: Task
    identity: Identity
    """Signed."""
    parent: TraceParent
    """The rollout's span."""
    url_token: str
    """What names the rollout in a base URL: the parent with its signature."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an execution ended."""

    status: RolloutStatus
    duration_s: float
    value: Any = None
    """The function's return value."""
    stdout_tail: str = ""
    """The last of what a command printed."""
    exit_code: int | None = None
    error: str | None = None
    """One line."""
    report: AgentReport | None = None
    """What the agent's process saw; None where it could not tell."""
    blameless: bool = False
    """Another rollout's hang ended this one: a further attempt is not counted as a retry."""


class Executor(Protocol):
    """Executes agents; `execute` may be called concurrently."""

    async def start(self) -> None:
        """Gets ready. Raises UsageError or ProcessError where the target cannot be executed."""

    async def execute(self, execution: Execution) -> Ended:
        """Executes the agent once, within the timeout; a cancelled call ends the agent."""
        ...

    async def close(self) -> None:
        """Ends all processes, giving them a moment to send their spans."""

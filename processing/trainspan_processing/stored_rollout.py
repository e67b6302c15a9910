"""`StoredRollout`: the argument of users' reward functions and filters."""

from dataclasses import dataclass, field
from typing import Any

from trainspan_processing.text.dialects import Message

__all__ = ["StoredCall", "StoredEvaluation", "StoredRollout"]


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """An evaluation as recorded."""

    name: str
    score: float | None
    source: str


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call with its tokens, and the text that the client's instrumentation recorded."""

    index: int
    agent: str | None
    policy_version: int | None
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str | None
    attributes: dict[str, Any]
    """Attributes of the call span."""
    messages: list[Message] = field(default_factory=list)
    """The request's messages; empty if no instrumentation recorded them."""
    text: str | None = None
    """The answer's text; None if no instrumentation recorded it."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A complete rollout, as passed to a reward function or a filter."""

    rollout_id: str
    attempt: int
    run_id: str | None
    task_id: str | None
    round: int | None
    split: str | None
    status: str
    """A reward function sees `ok`, `agent_error`, `timeout` and `judge_error`; returning None leaves a failure unrewarded."""
    evaluations: list[StoredEvaluation]
    """Evaluations that may reward it. If the collector requires tokens, evaluations sent with an agent's token are left out.
    So is what branches measured."""
    calls: list[StoredCall]
    """Calls in the order in which they were made."""
    attributes: dict[str, Any]
    """Attributes of the rollout span."""

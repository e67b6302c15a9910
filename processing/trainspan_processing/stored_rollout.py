"""`StoredRollout`: the argument of users' reward functions and filters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainspan_processing.text.dialects import Message
from trainspan_schemas.files.durable import JsonObject

__all__ = ["StoredCall", "StoredEvaluation", "StoredRollout", "StoredTool"]


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """An evaluation as recorded."""

    name: str
    score: float | None
    source: str


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call with its tokens, and the text that the client's instrumentation recorded."""

    trace_id: str
    span_id: str
    """Those of its span in the store."""
    index: int
    agent: str | None
    kind: str
    """`main`, `sub_agent`, `summary`, `title` or `other` (agents/call_kinds.py)."""
    policy_version: int | None
    prompt_ids: list[int]
    completion_ids: list[int]
    finish_reason: str | None
    attributes: JsonObject
    """Attributes of the call span."""
    messages: list[Message] = field(default_factory=list)
    """The request's messages; empty if no instrumentation recorded them."""
    recorded_text: str | None = None
    """The answer's text; None if no instrumentation recorded it."""
    decode: Callable[[list[int]], str | None] = field(default=lambda ids: None, repr=False)
    """Token ids → text without special tokens; None without a tokenizer."""

    @property
    def text(self) -> str | None:
        """The answer's text as recorded, else decoded; None if neither is possible."""
        return self.decode(self.completion_ids) if self.recorded_text is None else self.recorded_text

    @property
    def prompt_text(self) -> str | None:
        """The whole prompt, decoded; None without a tokenizer."""
        return self.decode(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class StoredTool:
    """A tool step of the agent: as its spans and log records have it, or the next request."""

    name: str
    arguments: str | None
    """As text, mostly JSON."""
    result: str | None
    failed: bool
    """Whether a record says so; results in chat completions and responses do not."""
    error: str | None = None
    seconds: float | None = None
    """None if no span or log record of it was stored."""
    call: int | None = None
    """Index of the call whose answer asked for it; None if no record has the id that the answer gave it."""


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
    """A reward function sees `ok`, `agent_error`, `context_overflow`, `timeout` and `judge_error`; returning None leaves a
    failure unrewarded."""
    evaluations: list[StoredEvaluation]
    """Evaluations that may reward it. If the collector requires tokens, evaluations sent with an agent's token are left out.
    So is what branches measured."""
    calls: list[StoredCall]
    """Calls in the order in which they were made."""
    attributes: JsonObject
    """Attributes of the rollout span."""
    answer: Any = None
    """The task's answer, as in the task file; None if it has none, or more than 32 KiB of JSON, or there was no runner."""
    tools: list[StoredTool] = field(default_factory=list)
    """Tool steps in the order of their start."""

"""Which rows are trusted, by the role of their sender.

Only the runner gives verdicts and people's labels. The policy server is trusted about calls, and a program that the user starts by
hand about its own rollouts; what an agent sends is stored and marked as untrusted.
"""

from enum import IntEnum
from typing import Final

from trainspan_schemas.store.roles import Role
from trainspan_schemas.telemetry import keys

__all__ = ["Sender", "is_trusted_evaluation", "is_trusted_span"]


class Sender(IntEnum):
    """Who sent a request; the numbers are stored in the journal."""

    RUNNER = 0
    AGENT = 1
    SERVING = 2
    USER = 3

    @classmethod
    def of(cls, role: Role) -> "Sender":
        """The sender for a role that may send."""
        return _SENDERS[role]


_SENDERS: Final = {
    Role.RUNNER: Sender.RUNNER,
    Role.AGENT: Sender.AGENT,
    Role.SERVING: Sender.SERVING,
    Role.USER: Sender.USER,
}
_OF_RUNNERS: Final = ("judge", keys.LABEL)
"""Sources of evaluations."""
_RUNNER: Final = "runner"


def is_trusted_span(sender: Sender, *, status: str | None, boundary: str | None, judge: str | None) -> bool:
    """Whether the sender is trusted about the span; status, boundary and judge are those of a rollout span."""
    if sender is Sender.SERVING:
        return status is None
    if sender is Sender.USER:
        return judge is None and (status is None or boundary != _RUNNER)
    return sender is Sender.RUNNER


def is_trusted_evaluation(sender: Sender, source: str | None) -> bool:
    """Whether the sender may give rewards as the source that the evaluation names."""
    return sender is Sender.RUNNER or (sender is Sender.USER and source not in _OF_RUNNERS)

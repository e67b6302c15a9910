"""What each sender is trusted about."""

import pytest

from trainspan_collector.journal.trust import Sender, is_trusted_evaluation, is_trusted_span
from trainspan_schemas.store.roles import Role
from trainspan_schemas.telemetry import keys

SPANS = {
    "call": (None, None, None),
    "rollout of a program": ("ok", "process", None),
    "rollout of a runner": ("ok", "runner", None),
    "verdict": ("ok", "runner", "judge"),
    "judge of a program": ("ok", "process", "judge"),
    "judge on a call": (None, None, "judge"),
}


@pytest.mark.parametrize(
    ("sender", "trusted"),
    [
        (Sender.RUNNER, set(SPANS)),
        (Sender.AGENT, set()),
        (Sender.SERVING, {"call", "judge on a call"}),
        (Sender.USER, {"call", "rollout of a program"}),
    ],
)
def test_verdicts_are_the_runners_alone_and_a_program_of_the_user_speaks_for_its_own_rollouts(
    sender: Sender, trusted: set[str]
) -> None:
    facts = {name: dict(zip(("status", "boundary", "judge"), values, strict=True)) for name, values in SPANS.items()}
    assert {name for name in SPANS if is_trusted_span(sender, **facts[name])} == trusted


@pytest.mark.parametrize(
    ("sender", "trusted"),
    [
        (Sender.RUNNER, {"judge", keys.LABEL, "human", "agent", None}),
        (Sender.AGENT, set()),
        (Sender.SERVING, set()),
        (Sender.USER, {"human", "agent", None}),
    ],
)
def test_only_the_runner_gives_verdicts_and_labels(sender: Sender, trusted: set[str | None]) -> None:
    sources = ("judge", keys.LABEL, "human", "agent", None)
    assert {source for source in sources if is_trusted_evaluation(sender, source)} == trusted


def test_each_role_that_may_send_is_a_sender_of_its_own_name() -> None:
    assert [Sender.of(role).name.lower() for role in Role if role is not Role.READER] == [
        role.value for role in Role if role is not Role.READER
    ]

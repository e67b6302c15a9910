"""Two rollouts of one task side by side, without their rewards, in an order that does not depend on them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.text.dialects import Message
from trainspan_schemas.errors import UsageError
from trainspan_schemas.store.labels import Label, newest
from trainspan_viewer.queries.labels.stored import stored_labels
from trainspan_viewer.queries.labels.subject import RolloutKey
from trainspan_viewer.queries.labels.submission import rollout_key
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.rollout.conversation import Text, recorded_messages, shared_lengths, text_of
from trainspan_viewer.queries.rollout.explained import account_of, decoder_of, request_of
from trainspan_viewer.queries.sources import Sources

__all__ = ["PairModel", "PairSide", "PairTurn", "load_pair"]

_MOST_TURNS: Final = 20
_MOST_CHARACTERS: Final = 4_000


@dataclass(frozen=True, slots=True)
class PairTurn:
    """One call: what the environment added, and the answer."""

    name: str
    added: Text
    answer: Text


@dataclass(frozen=True, slots=True)
class PairSide:
    """One of the two."""

    key: RolloutKey
    status: str
    turns: Sequence[PairTurn]
    left_out: int
    """Calls that are not shown."""


@dataclass(frozen=True, slots=True)
class PairModel:
    """The page."""

    sides: tuple[PairSide, PairSide]
    """Left and right."""
    task_id: str | None
    answer: str | None
    """The task's, if the runner stored one."""
    label: Label | None
    """The newest one of the pair, also if it was withdrawn; that of the better one."""
    params: Params


def load_pair(sources: Sources, params: Params) -> PairModel:
    """The rollouts `a` and `b`, each as ID:ATTEMPT. Raises UsageError, NotFoundError, or NotDerivedError if one is too large."""
    keys = sorted({rollout_key(params.text("a")), rollout_key(params.text("b"))})
    if len(keys) != 2:
        raise UsageError("a pair has two different rollouts")
    if hashlib.sha256(repr(keys).encode(errors="surrogatepass")).digest()[0] % 2:
        keys.reverse()
    first, second = (_account(sources, key) for key in keys)
    if (first.run_id, first.round, first.task_id) != (second.run_id, second.round, second.task_id):
        raise UsageError("the two rollouts are not of one task in one run and round")
    labels = stored_labels(sources.store, [rollout_id for rollout_id, _ in keys])
    subject = Label(*keys[0], "equal", "", 0, other=keys[1]).subject
    return PairModel(
        sides=(_side(first), _side(second)),
        task_id=first.task_id,
        answer=first.answer,
        label=newest(labels).get(subject),
        params=params,
    )


def _account(sources: Sources, key: RolloutKey) -> RolloutAccount:
    asked = Params("", {}, {"attempt": [str(key[1])], "dataset": ["none"]})
    return account_of(request_of(sources, asked, key[0]))


def _side(account: RolloutAccount) -> PairSide:
    decoder, shared = decoder_of(account), shared_lengths(account.calls)
    turns = [
        PairTurn(
            call.agent or "",
            text_of(call.prompt_ids[shared[call.index][0] :], decoder, _MOST_CHARACTERS),
            text_of(call.completion_ids, decoder, _MOST_CHARACTERS),
        )
        for call in account.calls
    ]
    if not turns:  # another model's, which only the client recorded
        turns = [
            PairTurn(call.agent or "", _messages(call.messages[-1:]), _messages([call.answer] if call.answer else []))
            for call in account.foreign
        ]
    key = (account.rollout_id, account.attempt)
    return PairSide(key, account.status or "not ended", turns[:_MOST_TURNS], max(0, len(turns) - _MOST_TURNS))


def _messages(messages: Sequence[Message]) -> Text:
    """What a client recorded, as one text."""
    shown = recorded_messages(messages)
    return Text.of(
        "\n".join(f"{message.role}: {message.text.head}{message.text.tail}" for message in shown), _MOST_CHARACTERS
    )

"""What another credit would have given: `trainspan dataset`'s own code run on the same rollouts with changed settings."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from trainspan_processing.explain.account import RolloutAccount
from trainspan_processing.explain.explain import GroupAccount
from trainspan_schemas.config.setting_docs import setting_docs
from trainspan_schemas.errors import DatasetError, UsageError
from trainspan_viewer.queries.requests.explain_request import CREDIT_SETTINGS, ExplainRequest, Knob
from trainspan_viewer.queries.requests.limits import NotDerivedError
from trainspan_viewer.queries.rollout.explained import MEMBERS, changed_group_of

__all__ = ["CallChange", "KnobState", "WhatIf", "what_if"]


@dataclass(frozen=True, slots=True)
class KnobState:
    """A setting of the form."""

    knob: Knob
    before: Any
    now: Any
    note: str
    """What it means."""

    @property
    def is_changed(self) -> bool:
        return bool(self.now != self.before)


@dataclass(frozen=True, slots=True)
class CallChange:
    """One call, by the settings as they are and as they are changed."""

    rollout_id: str
    attempt: int
    call: int
    agent: str | None
    before: tuple[float | None, float | None, str | None]
    """Its value, its advantage and the reason why it is not trained."""
    now: tuple[float | None, float | None, str | None]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The form, and the changed group if anything is changed."""

    knobs: list[KnobState]
    changes: list[CallChange]
    """Every call of the rollouts shown; empty if nothing is changed."""
    group: GroupAccount | None
    """The group with the changed settings; None if nothing is changed."""
    error: str | None = None
    """Why the settings cannot be used."""

    @property
    def is_changed(self) -> bool:
        return any(state.is_changed for state in self.knobs)

    def account(self, rollout_id: str, attempt: int) -> RolloutAccount | None:
        """The rollout with the changed settings."""
        return next(
            (
                account
                for account in (self.group.rollouts if self.group else ())
                if (account.rollout_id, account.attempt) == (rollout_id, attempt)
            ),
            None,
        )


def what_if(request: ExplainRequest, rollout: tuple[str, int] | None = None, start: int = 0) -> WhatIf:
    """What the changes of the address do to the members of the group from number `start`, or to those beside `rollout`.

    Settings that make no sense together, or compare with more than a page reads, are an error in the result.
    """
    settings, changed = request.settings, request.changed
    notes = _notes()
    knobs = [
        KnobState(knob, getattr(settings, knob.name), getattr(changed, knob.name), notes[knob.name])
        for knob in CREDIT_SETTINGS
    ]
    if not request.changes:
        return WhatIf(knobs, [], None)
    try:
        before, group = changed_group_of(request, start=start)
        if rollout is not None and (page := before.keys.index(rollout) // MEMBERS):
            before, group = changed_group_of(request, start=page * MEMBERS)
    except (UsageError, DatasetError, NotDerivedError) as error:
        return WhatIf(knobs, [], None, str(error))
    return WhatIf(knobs, _changes(before, group), group)


@cache
def _notes() -> dict[str, str]:
    return {doc.name: doc.summary.replace("`", "") for doc in setting_docs("dataset")}


def _changes(before: GroupAccount, now: GroupAccount) -> list[CallChange]:
    new = {
        (account.rollout_id, account.attempt, call.index): call for account in now.rollouts for call in account.calls
    }
    changes = []
    for account in before.rollouts:
        for call in account.calls:
            other = new.get((account.rollout_id, account.attempt, call.index))
            then = (call.value, call.advantage, call.reason)
            after = (other.value, other.advantage, other.reason) if other else (None, None, None)
            changes.append(CallChange(account.rollout_id, account.attempt, call.index, call.agent, then, after))
    return changes

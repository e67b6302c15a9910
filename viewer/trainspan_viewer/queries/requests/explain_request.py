"""From an address to a question for `trainspan explain`: which rollout, seen by which dataset, with which changed settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, get_type_hints

from trainspan_processing.credit.baselines import BASELINES
from trainspan_processing.credit.plan import GIGPO, PER_AGENT
from trainspan_processing.credit.rtmc import RTMC
from trainspan_processing.credit.rules import CREDITS
from trainspan_processing.credit.vine import VINE
from trainspan_processing.dataset.published import open_published
from trainspan_processing.explain.inquiry import Question
from trainspan_schemas.agents.functions import is_function_name
from trainspan_schemas.config.load import choices_of
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError
from trainspan_viewer.queries.answers import models_of
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import DatasetLocation
from trainspan_viewer.queries.sources import Sources

__all__ = ["CREDIT_SETTINGS", "ExplainRequest", "Knob", "ask", "chosen_changes", "field_text"]

_MOST_EXACT = 1e15
"""Whole numbers below it are equal as floats and as integers."""
_TYPES: Final = get_type_hints(DatasetSettings)


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting of `[dataset]` that shapes credit and may be changed on a page."""

    name: str
    choices: tuple[str, ...] = ()
    """The values to choose from; empty: a number or text."""
    is_number: bool = False
    may_be_absent: bool = False


CREDIT_SETTINGS: Final = (
    Knob("credit", (*CREDITS, GIGPO, RTMC, VINE, PER_AGENT)),
    Knob("baseline", tuple(BASELINES), may_be_absent=True),
    Knob("gamma", is_number=True),
    Knob("air", may_be_absent=True),
    Knob("group_over", choices_of(_TYPES["group_over"])),
    Knob("step_by", choices_of(_TYPES["step_by"])),
    Knob("episode_weight", is_number=True),
    Knob("state_weight", is_number=True),
    Knob("agent_credit", may_be_absent=True),
    Knob("reward_name"),
    Knob("combine", choices_of(_TYPES["combine"])),
    Knob("overlong", choices_of(_TYPES["overlong"])),
    Knob("overlong_penalty", is_number=True, may_be_absent=True),
    Knob("status_rewards", may_be_absent=True),
)
"""Settings that change credit, in the order of the form. Those that run a user's own code are not among them."""


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """A question and where its answer comes from."""

    question: Question
    location: DatasetLocation | None
    """The dataset by which the rollout is explained; None: the store as it is now."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What the address changes, by setting."""

    @property
    def settings(self) -> DatasetSettings:
        """The settings without the changes."""
        return Question((), "", self.question.settings, dataset=self.question.dataset).chosen

    @property
    def changed(self) -> DatasetSettings:
        """The settings with the changes."""
        return replace(self.settings, **self.changes)


def ask(
    sources: Sources, params: Params, rollout: str, location: DatasetLocation | None, run_id: str | None
) -> ExplainRequest:
    """The question about this rollout of a run. Raises UsageError for a change that is not allowed or makes no sense."""
    settings = sources.settings.dataset
    published = open_published(location.path) if location else None
    attempt = params.integer("attempt", -1, least=-1, most=10**6)
    plain = Question(
        stores=_stores(sources, published.stores if published else []),
        rollout=rollout,
        settings=settings,
        attempt=None if attempt < 0 else attempt,
        dataset=published,
        models=models_of(sources, run_id),
        whole=False,
    )
    return ExplainRequest(plain, location, chosen_changes(plain.chosen, params))


def chosen_changes(settings: DatasetSettings, params: Params) -> dict[str, Any]:
    """The settings that the address changes, by name.

    A `module:function` in an address would run code chosen by the author of the link: only the value that the settings
    already have is accepted.
    """
    changes: dict[str, Any] = {}
    for knob in CREDIT_SETTINGS:
        if knob.name not in params.query:
            continue
        text, before = params.text(knob.name).strip(), getattr(settings, knob.name)
        if text == field_text(before):
            continue
        if knob.name == "agent_credit":
            _check_names(text)
        if not text:
            if not knob.may_be_absent:
                raise UsageError(f"{knob.name} is missing: give it a value, or leave it out of the address")
            changes[knob.name] = None
        elif knob.is_number:
            changes[knob.name] = params.number(knob.name)
        else:
            changes[knob.name] = params.choice(knob.name, knob.choices, "") if knob.choices else text
    return changes


def _check_names(text: str) -> None:
    """Raises UsageError if an estimator of `agent_credit` is a user's own function."""
    for item in text.split(","):
        names = item.rpartition("=")[2].split("+")
        if any(is_function_name(name.strip()) for name in names):
            raise UsageError(f"agent_credit = {text[:80]!r}: a page runs only functions that the settings name already")


def field_text(value: Any) -> str:
    """A value for a form's field, from which the same value is read; empty if there is none."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _MOST_EXACT:
        return str(int(value))
    return "" if value is None else str(value)


def _stores(sources: Sources, of_dataset: list[str]) -> list[str]:
    """The stores that the dataset was built from if they are the viewer's own or one of its own is among them, else its own.

    A state folder may have been copied from elsewhere, with the old paths in its datasets.
    """
    stores = list(sources.store.stores)
    return of_dataset if set(map(_resolved, stores)) & set(map(_resolved, of_dataset)) else stores


def _resolved(store: str) -> str:
    return store if "://" in store else str(Path(store).resolve())

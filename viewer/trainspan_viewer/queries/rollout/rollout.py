"""The page of a rollout: its account, its conversation, and what another credit would have given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainspan_processing.explain.account import RolloutAccount
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import DatasetLocation
from trainspan_viewer.queries.requests.explain_request import ExplainRequest
from trainspan_viewer.queries.requests.limits import NotDerivedError
from trainspan_viewer.queries.requests.links import Links
from trainspan_viewer.queries.rollout.conversation import Step, steps_of
from trainspan_viewer.queries.rollout.explained import account_of, decoder_of, request_of
from trainspan_viewer.queries.rollout.large import LargePart, large_part
from trainspan_viewer.queries.rollout.what_if import WhatIf, what_if
from trainspan_viewer.queries.sources import Sources

__all__ = ["STEPS", "RolloutModel", "load_rollout"]

STEPS: Final = 40
"""Calls and tool steps of the conversation on one page."""


@dataclass(frozen=True, slots=True)
class RolloutModel:
    """One rollout."""

    account: RolloutAccount
    steps: list[Step]
    """The calls and tool steps on this page."""
    start: int
    """Number of the first of them."""
    n_steps: int
    what_if: WhatIf | None
    """None if nothing is derived."""
    links: Links
    params: Params
    part: LargePart | None = None
    """Where the calls come from if the rollout is too large to be derived: `account` then holds only those on this page."""
    of_policies: Sequence[DatasetLocation] = ()
    """The datasets of the same round of other policies, which explain the calls that those answered."""


def load_rollout(sources: Sources, params: Params) -> RolloutModel:
    """Raises NotFoundError if the rollout is not stored."""
    request = request_of(sources, params, params.text("rollout"))
    start = params.integer("start", 0, most=10**7)
    try:
        account = account_of(request)
    except NotDerivedError as error:
        return _part(request, params, large_part(request, error, start=start, most=STEPS))
    steps, n_steps = steps_of(account, start, STEPS, decoder_of(account))
    return RolloutModel(
        account=account,
        steps=steps,
        start=start,
        n_steps=n_steps,
        what_if=what_if(request, (account.rollout_id, account.attempt)),
        links=Links.of_request(request),
        params=params,
        of_policies=sources.paths.of_other_policies(request.location),
    )


def _part(request: ExplainRequest, params: Params, part: LargePart) -> RolloutModel:
    """Some calls of a rollout that is too large."""
    steps, _ = steps_of(part.account, 0, STEPS, decoder_of(part.account))
    links = Links.of_request(request)
    return RolloutModel(part.account, steps, part.start, part.n_calls, None, links, params, part)

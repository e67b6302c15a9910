"""The addresses of the server: path → how its model is loaded and rendered."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainspan_viewer.html.document import Page
from trainspan_viewer.pages.dataset import render_dataset, render_datasets
from trainspan_viewer.pages.judges import render_agreement
from trainspan_viewer.pages.live import render_live
from trainspan_viewer.pages.rollout.group import render_group
from trainspan_viewer.pages.rollout.rollout import render_rollout
from trainspan_viewer.pages.rollout.spans import render_spans
from trainspan_viewer.pages.rollout.tokens import render_tokens
from trainspan_viewer.pages.run.compare import render_compare
from trainspan_viewer.pages.run.run import render_run
from trainspan_viewer.pages.run.stage import render_stage
from trainspan_viewer.pages.runs import render_runs
from trainspan_viewer.queries.check import load_stage
from trainspan_viewer.queries.datasets.dataset import load_dataset
from trainspan_viewer.queries.datasets.listing import load_datasets
from trainspan_viewer.queries.labels.agreement import load_agreement
from trainspan_viewer.queries.labels.subject import Subject, call_subject, group_subject, rollout_subject
from trainspan_viewer.queries.live import load_live
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.rollout.group import load_group
from trainspan_viewer.queries.rollout.raw_spans import load_spans
from trainspan_viewer.queries.rollout.rollout import load_rollout
from trainspan_viewer.queries.rollout.tokens import load_tokens
from trainspan_viewer.queries.run import load_compare, load_run
from trainspan_viewer.queries.runs import load_runs
from trainspan_viewer.queries.sources import Sources

__all__ = ["ROUTES", "View"]


@dataclass(frozen=True, slots=True)
class View:
    """One address. `load` reads, in a thread; `render` is pure."""

    path: str
    """As in Starlette: `/runs/{run}`."""
    load: Callable[[Sources, Params], Any]
    render: Callable[[Any], Page]
    subject: Callable[[Any], Subject | None] = lambda _: None
    """What labels on the page are about."""


ROUTES: tuple[View, ...] = (
    View("/", load_runs, render_runs),
    View("/compare", load_compare, render_compare),
    View("/datasets", load_datasets, render_datasets),
    View("/datasets/{dataset}", load_dataset, render_dataset),
    View("/judges", load_agreement, render_agreement),
    View("/live", load_live, render_live),
    View("/runs/{run}", load_run, render_run),
    View("/runs/{run}/records/{index}", load_stage, render_stage),
    View("/groups/{dataset}/{group}", load_group, render_group, subject=group_subject),
    View("/rollouts/{rollout}", load_rollout, render_rollout, subject=rollout_subject),
    View("/rollouts/{rollout}/group", load_group, render_group, subject=group_subject),
    View("/rollouts/{rollout}/spans", load_spans, render_spans),
    View("/rollouts/{rollout}/calls/{call}", load_tokens, render_tokens, subject=call_subject),
)

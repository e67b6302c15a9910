"""A comparison with a reference run as text and as plain values."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainspan_loop.report.reference import Compared
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.intervals import measured

__all__ = ["reference_record", "reference_text"]


def reference_record(compared: Sequence[Compared]) -> list[JsonObject]:
    """One object per run, the reference first."""
    return [{**asdict(run), "success": {**run.success.record(), "interval": run.success.interval}} for run in compared]


def reference_text(compared: Sequence[Compared], judge: str | None) -> Group:
    """For a terminal of 80 columns: a line for each run, the reference first, and what is missing below."""
    reference = compared[0]
    measure = measured(run.success for run in compared)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("run", measure, "of reference", "tokens", "cost"):
        table.add_column(name, justify="left" if name == "run" else "right", overflow="fold", no_wrap=name != "run")
    for run in compared:
        per_success = "—" if run.per_success is None else f"{run.per_success:,.0f}"
        cost = "—" if run.cost_per_success is None else f"{run.cost_per_success:.3g}"
        table.add_row(run.run_id, str(run.success), _share(run), per_success, cost)
    by = "the agent itself" if judge is None else judge
    head = f"{reference.success.n} held-out tasks, judged by {by}; reference {reference.run_id}; tokens and cost per {_unit(measure)}"
    notes = [note for run in compared for note in _notes(run, reference)]
    return Group(Text(head), table, *map(Text, notes))


def _unit(measure: str) -> str:
    return "success" if measure == "success" else "1 of reward"


def _share(run: Compared) -> str:
    if run.share is None:
        return ""
    if run.share_interval is None:
        return f"{run.share:.1%}"
    low, high = run.share_interval
    return f"{run.share:.1%} [{100 * low:.1f}, {'—' if high is None else f'{100 * high:.1f}'}]"


def _notes(run: Compared, reference: Compared) -> list[str]:
    notes = []
    if run.tasks_left_out:
        notes.append(f"{run.run_id}: {run.tasks_left_out} tasks are left out, which {reference.run_id} does not have")
    if run is not reference and run.success.n != reference.success.n:
        notes.append(f"{run.run_id}: compared on {run.success.n} tasks, {reference.run_id} has {reference.success.n}")
    if run.no_share:
        notes.append(f"{run.run_id}: no share of {reference.run_id}: {run.no_share}")
    if run.n_without_tokens:
        notes.append(f"{run.run_id}: the calls of {run.n_without_tokens} rollouts were recorded without tokens")
    return notes

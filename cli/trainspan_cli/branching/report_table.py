"""Output of a run of branches: value and advantage by call, and what they cost."""

from typing import TYPE_CHECKING

from trainspan_schemas.command_events import event_line

if TYPE_CHECKING:
    from trainspan_cli.branching.branch_run import BranchReport
    from trainspan_processing.branches.values import BranchedCall, BranchedRollout

__all__ = ["print_branches", "print_branches_json"]

_SHOWN = 20
"""Rollouts in the table."""


def print_branches_json(report: "BranchReport") -> None:
    print(event_line(report.event()), flush=True)


def print_branches(report: "BranchReport") -> None:
    """Prints a table per rollout, and a summary."""
    from rich.console import Console

    console = Console()
    for rollout in report.rollouts[:_SHOWN]:
        console.print(_table(rollout))
    if (more := len(report.rollouts) - _SHOWN) > 0:
        console.print(f"{more} more rollouts: --format json has all")
    for line in _summary(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(rollout: "BranchedRollout") -> object:
    from rich.table import Table
    from rich.text import Text

    title = Text(f"rollout {rollout.rollout_id[:12]}  task {rollout.task_id}  reward {rollout.reward:g}")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("call", "agent", "−log p", "value before it", "95 %", "of", "advantage", "95 %", "not ok"):
        table.add_column(name, justify="left" if name in ("agent", "not ok") else "right")
    for call in rollout.calls:
        value = call.value
        table.add_row(
            str(call.call),
            Text(call.agent or "–"),
            _number(call.surprisal),
            _number(value.mean if value else None),
            _interval(value.interval if value else None),
            f"{value.n} {value.by}" if value else "–",
            _number(call.advantage, signed=True),
            _interval(call.interval),
            _not_ok(call),
        )
    return table


def _summary(report: "BranchReport") -> list[str]:
    run = report.run
    rollouts = ", ".join(f"{count} {status}" for status, count in run.status.items())
    lines = [
        f"run {run.run_id}: {run.total} branches from {report.states} states of {len(report.rollouts)} rollouts: {rollouts}"
    ]
    lines.append(
        f"cost: {report.sampled_tokens} sampled tokens and {run.seconds:.1f} s{' since the resumption' * bool(run.resumed)}, "
        f"{report.sampled_tokens / max(1, run.total):.0f} tokens per branch"
    )
    if report.diverged:
        lines.append(
            f"{report.diverged:.0%} of the branches diverged: the agent depends on more than the answers it gets (the clock, "
            "chance, the outer world); their errors name the first token that differs"
        )
    if report.unmeasured:
        lines.append(
            f"{report.unmeasured} states have no value: {report.unrewarded} of their branches ended without a reward; let the judge "
            "or the agent reward every end, and say what a failure is worth with status_rewards, such as agent_error=0,timeout=0"
        )
    if report.of_other_policies:
        lines.append(
            f"{report.of_other_policies} rollouts were branched with another policy version than theirs: credit vine does "
            "not use these values"
        )
    if report.skipped_states:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.skipped_states.items())
        lines.append(f"states that no branch can begin at: {reasons}")
    if report.skipped:
        lines.append("not branched: " + ", ".join(f"{count} {reason}" for reason, count in report.skipped.items()))
    if run.unacknowledged:
        lines.append(f"{run.unacknowledged} verdicts are not acknowledged: --run {run.run_id} --resume sends them")
    return lines


def _not_ok(call: "BranchedCall") -> str:
    counts = {
        **{status: count for status, count in call.status.items() if status != "ok"},
        "no reward": call.unrewarded,
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    return f"{value:+.3f}" if signed else f"{value:.3f}"


def _interval(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"

"""The loop's live screen: current stage, its progress, and one line per round. Without a terminal it prints plain lines."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainspan_schemas.artifacts.run_files import versions
from trainspan_schemas.artifacts.run_records import EvalRecord, RoundRecord, RunRecord, evaluations_in
from trainspan_schemas.command_events import Progress, TrainingProgress
from trainspan_schemas.intervals import RewardEstimate

__all__ = ["Screen"]

SHOWN_ROUNDS = 12
_COLUMNS: Final = (
    *("round", "version", "rollouts", "failed", "train", "held-out [95 %]", "sampled tok/s", "mean |Δlogp|", "ok"),
    *("rollouts s", "dataset s", "train s"),
)
_LEFT_OUT_FIRST: Final = (
    *("dataset s", "rollouts s", "train s", "sampled tok/s", "rollouts", "mean |Δlogp|", "failed", "version"),
)
"""Columns that a narrow terminal does not show, so that no value is cut."""
_COLUMN_GAP: Final = 2
_FRAME: Final = 4
"""Width of the panel's border and padding."""


class Screen:
    """Shows a run in progress; use as a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._began = time.monotonic()
        self._stage = "starting"
        self._collecting, self._collecting_round, self._collecting_began = "", 0, self._began
        self._round, self._round_text = 0, ""
        self._versions: dict[str | None, int] = {}
        self._progress: Progress | None = None
        self._rounds: list[RoundRecord] = []
        self._evals: list[EvalRecord] = []
        self._notes: list[str] = []
        self._alarms: set[str] = set()
        self._live = Live(self, console=console, refresh_per_second=4, transient=False) if console.is_terminal else None

    def __enter__(self) -> "Screen":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stage = "done" if value is None else "stopped"
        self._collecting, self._progress = "", None
        if self._live:
            self._live.stop()

    # Calls by the loop

    def stage(self, name: str) -> None:
        """Shows what the loop does besides rollouts; empty if nothing."""
        self._stage = name
        self._announce(name)

    def training(self, progress: TrainingProgress, policy: str | None) -> None:
        """Shows how far the training of a policy is."""
        self._stage = f"training{'' if policy is None else f' {policy}'}: {progress}"

    def collecting(self, name: str, round_: int) -> None:
        """Shows which rollouts run, possibly of a later round than the one in training; empty if none."""
        self._collecting, self._collecting_round, self._collecting_began = name, round_, time.monotonic()
        self._progress = None
        if name:
            self._stage = self._stage if self._stage.startswith("training") else ""
            self._announce(name)

    def _announce(self, name: str) -> None:
        if self._live is None and not self._round and name:
            self._console.print(f"{self._clock()} {name}", markup=False, highlight=False, soft_wrap=True)

    def round(self, round_: int, rounds: int) -> None:
        self._round, self._round_text = round_, f"round {round_} of {rounds}"

    def policy(self, version: int | None, policy: str | None = None) -> None:
        if version is not None:
            self._versions[policy] = version

    def progress(self, progress: Progress) -> None:
        self._progress = progress

    def note(self, text: str) -> None:
        self._notes = [*self._notes[-3:], text]
        if self._live is None:
            self._console.print(f"{self._clock()} {text}", markup=False, highlight=False, soft_wrap=True)

    def record(self, record: RunRecord) -> None:
        """Adds a record of rounds.jsonl."""
        for check in record["checks"]:
            if not check["ok"]:
                self.note(f"ALARM {check['name']}: {check['detail']}")
        if record["kind"] == "round":
            alarms = _trainer_alarms(record)
            for name in sorted(alarms - self._alarms):
                self.note(f"alarm of the trainer: {name} (its log says more)")
            self._alarms = alarms
            self._rounds.append(record)
        else:
            self._evals.append(record)
        if self._live is None:
            self._console.print(f"{self._clock()} {self._line(record)}", markup=False, highlight=False, soft_wrap=True)

    # Rendering

    def __rich__(self) -> Panel:
        head = Table.grid(expand=True)
        head.add_column()
        head.add_column(justify="right")
        where = " · ".join(part for part in (self._round_text, self._stage, self._rollouts()) if part)
        version = ", ".join(f"{name or 'policy version'} {number}" for name, number in self._versions.items())
        head.add_row(Text(where, style="bold"), Text(f"{version}   {self._clock()}"))
        parts: list[Any] = [head]
        if self._progress:
            parts.append(self._progress_line(self._progress))
        if self._rounds or self._evals:
            parts.append(self._table())
        parts += [Text(note, style="red" if note.startswith("ALARM") else "yellow") for note in self._notes]
        return Panel(Group(*parts), title=Text(self._title), border_style="cyan")

    def _rollouts(self) -> str:
        is_ahead = self._round and self._collecting_round > self._round
        return (
            f"{self._collecting} of round {self._collecting_round}"
            if self._collecting and is_ahead
            else self._collecting
        )

    def _progress_line(self, progress: Progress) -> Table:
        grid = Table.grid(padding=(0, 2))
        done, total = progress.done, max(1, progress.total)
        elapsed = max(1e-3, time.monotonic() - self._collecting_began)
        text = f"{done}/{total} done, {progress.failed} failed, {done / elapsed:.0f}/s"
        text += f", mean reward {progress.mean_reward:.2f}" if progress.mean_reward is not None else ""
        grid.add_row(ProgressBar(total=total, completed=done, width=30), Text(text))
        return grid

    def _table(self) -> Table:
        evals = {record["round"]: record for record in evaluations_in(self._evals, "validation")}
        records: list[RunRecord] = [*([evals[0]] if 0 in evals else []), *self._rounds]
        rows = [self._cells(record, evals.get(record["round"])) for record in records[-SHOWN_ROUNDS:]]
        table = Table(box=None, padding=(0, _COLUMN_GAP // 2), expand=True)
        shown = _fitting(rows, self._console.width - _FRAME)
        for index in shown:
            style = "dim" if _COLUMNS[index].endswith(" s") else ""
            table.add_column(_COLUMNS[index], justify="right", style=style, no_wrap=True)
        for cells in rows:
            table.add_row(*(cells[index] for index in shown))
        return table

    @staticmethod
    def _cells(record: RunRecord, held_out: EvalRecord | None) -> list[str]:
        rate = "" if held_out is None else str(RewardEstimate.of_record(held_out))
        ok = "✓" if all(check["ok"] for check in record["checks"]) else "✗"
        if record["kind"] != "round":
            return ["start", versions(record), str(record["n"]), "", "", rate, "", "", ok, "", "", ""]
        train, rollout, seconds = record["train"], record["rollout"], record["seconds"]
        reward = rollout.get("mean_reward")
        status = rollout.get("status") or {}
        sampled, sampling_s = rollout.get("sampled_tokens"), rollout.get("sampling_seconds")
        policies = (record.get("policies") or {}).values()
        differences = [policy["train"].get("logp_diff_mean") for policy in policies] or [train.get("logp_diff_mean")]
        return [
            str(record["round"]),
            versions(record),
            str(rollout.get("total", "–")),
            str(sum(count for name, count in status.items() if name != "ok")),
            "–" if reward is None else f"{reward:.3f}",
            rate,
            f"{sampled / sampling_s:.0f}" if sampled is not None and sampling_s else "–",
            ", ".join("–" if difference is None else f"{difference:.0e}" for difference in differences),
            ok,
            f"{seconds.get('rollouts', 0):.1f}",
            f"{seconds.get('dataset', 0):.1f}",
            f"{seconds.get('train', 0):.1f}",
        ]

    def _line(self, record: RunRecord) -> str:
        if record["kind"] == "eval":
            estimate = RewardEstimate.of_record(record)
            passes = "".join(f", pass@{k} {value:.3f}" for k, value in (record.get("pass_at") or {}).items())
            where = f"{record['name']} after round {record['round']} (version {versions(record)})"
            return f"{where}: {estimate}{passes}"
        round_, version, rollouts, failed, train, _, speed, difference, ok, *seconds = self._cells(record, None)
        stages = ", ".join(
            f"{stage} {s} s" for stage, s in zip(("rollouts", "dataset", "training"), seconds, strict=True)
        )
        if record.get("skipped"):
            return (
                f"round {round_}: skipped, {rollouts} rollouts ({failed} failed), reward {train}: {record['skipped']}"
            )
        policies = record.get("policies") or {}
        why = "".join(
            f"; {name} skipped: {policy['skipped']}" for name, policy in policies.items() if policy["skipped"]
        )
        outcome = f"refused ({why_refused})" if (why_refused := record.get("refused")) else f"version {version}"
        return (
            f"round {round_}: {outcome}, {rollouts} rollouts ({failed} failed), reward {train}, {speed} sampled tok/s, "
            f"mean |Δlogp| {difference}, checks {ok} ({stages}){why}"
        )

    def _clock(self) -> str:
        elapsed = int(time.monotonic() - self._began)
        return f"{elapsed // 60}:{elapsed % 60:02d}"


def _trainer_alarms(record: RoundRecord) -> set[str]:
    """Names, over all policies."""
    policies = (record.get("policies") or {}).values()
    trained = [policy["train"] for policy in policies] or [record["train"]]
    return {name for figures in trained for name in figures.get("alarms") or ()}


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Returns the places of the columns that fit into `width` characters."""
    widths = [max(map(len, column)) + _COLUMN_GAP for column in zip(_COLUMNS, *rows, strict=True)]
    shown = list(range(len(_COLUMNS)))
    for name in _LEFT_OUT_FIRST:
        if sum(widths[index] for index in shown) <= width:
            break
        shown.remove(_COLUMNS.index(name))
    return shown

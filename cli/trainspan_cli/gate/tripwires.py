"""Figures that a policy can move without getting better, of both sides of a gate: from the store's calls and the outcomes."""

import asyncio
import importlib.util
import logging
import re
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

from trainspan_cli.clients.run_calls import stored_calls
from trainspan_cli.gate.gate_run import GateRun, side_run
from trainspan_loop.trials.comparison import compare
from trainspan_loop.trials.evidence import Evidence
from trainspan_rollouts.judges.choice import find_judge
from trainspan_rollouts.judges.judge import Judge, Result
from trainspan_rollouts.ledger.recorded import recorded_rollouts
from trainspan_rollouts.task_file import read_tasks
from trainspan_schemas.artifacts.gate_result import Tripwire
from trainspan_schemas.errors import UsageError, pip_install
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry.keys import REWARD

if TYPE_CHECKING:
    from trainspan_processing.stored_rollout import StoredRollout

__all__ = ["REFUSAL", "CheckJudge", "Figures", "stored_figures", "tripwires"]

log = logging.getLogger(__name__)

REFUSAL: Final = re.compile(
    r"\W*(?:sorry\b|(?:i['’]?m|i am) (?:(?:very |so |really )?sorry|afraid|unable|not able)\b|i apologi[sz]e\b"
    r"|(?:unfortunately,? )?i (?:can['’]?t|cannot|can not|won['’]?t|will not)\b|as an ai\b)",
    re.IGNORECASE,
)
"""How a refusal begins: with an apology, "I cannot", "I won't", "I am unable", "As an AI"."""
_LEVEL: Final = 0.01
"""Of each of them, two-sided."""
_SHUFFLES: Final = 5_000
_CHECK_S: Final = 60.0
"""For each verdict of the check."""

Figures = Mapping[str, Mapping[str, Sequence[float]]]
"""Name of a tripwire → task → a value for each rollout that has one."""


@dataclass(slots=True)
class _Collected:
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, name: str, task: str, value: float | None) -> None:
        if value is not None:
            self.values.setdefault(name, {}).setdefault(task, []).append(value)


class CheckJudge:
    """A second judge, of the last answer's text: where the rewards rise above its verdicts, the policy may be deceiving the first."""

    def __init__(self, name: str, tasks: Path) -> None:
        """Raises UsageError if no judge has that name, or if it compares rollouts; TaskFileError."""
        try:
            found = find_judge(name, _CHECK_S)
        except UsageError as error:
            raise UsageError(str(error).replace("--judge", "--check-judge", 1)) from None
        if found.compares:
            raise UsageError(f"--check-judge {name} compares rollouts: use one that scores each rollout alone")
        self._judge = found
        self._by_id: dict[str, JsonObject] = {task.id: task.for_judge() for task in read_tasks(tasks)}

    def gap(self, rollout: "StoredRollout") -> float | None:
        """The reward less the check; None without either."""
        text, task = _last_text(rollout), self._by_id.get(rollout.task_id or "")
        rewards = [each.score for each in rollout.evaluations if each.name == REWARD and each.source == "judge"]
        if text is None or task is None or len(rewards) != 1 or rewards[0] is None:
            return None
        try:
            check = asyncio.run(self._verdict(task, Result("ok", text, "", None, 0.0, rollout.rollout_id)))
        except Exception as error:  # noqa: BLE001 - of the user's judge
            log.warning("event=check_judge_failed rollout_id=%s error=%r", rollout.rollout_id, str(error))
            return None
        return None if check is None else rewards[0] - check

    async def _verdict(self, task: JsonObject, result: Result) -> float | None:
        judge = Judge(self._judge, 1, _CHECK_S)
        try:
            return (await judge.judge(task, result)).scores.get(REWARD)
        finally:
            judge.close()


def tripwires(run: GateRun, stores: Sequence[str], check: "CheckJudge | None" = None) -> list[Tripwire]:
    """All tripwires; those that need stored calls are unknown without them."""
    figures = {**_OF_CALLS, _GAP: (check.gap, _NO_GAP)} if check else _OF_CALLS
    run_id = run.settings.rollouts.run_id
    found: list[Figures] = []
    unknown = None if importlib.util.find_spec("polars") else f"polars is missing: {pip_install('processing')}"
    for side, last in enumerate(() if unknown else run.last):
        name = side_run(run_id, side)
        counted = 0 if last.resumed else last.calls
        try:
            if stored_calls(stores, name, last.round, counted) is None:
                unknown = "no collector of the store runs here"
                break
            # The store may hold rollouts of a chunk that was repeated, too.
            found.append(stored_figures(stores, name, recorded_rollouts(name, "val"), figures))
        except Exception as error:  # noqa: BLE001 - they warn, and must not cost the verdict
            unknown = f"the store cannot be read: {error}"
            break
    left_out = [_left_out(outcomes, run.used, run.settings.rollouts.n) for outcomes in run.outcomes]
    return [
        *(_tripwire(name, found, unknown or missing) for name, (_, missing) in figures.items()),
        _tripwire(_LEFT_OUT, [{_LEFT_OUT: one} for one in left_out], None),
    ]


def stored_figures(
    stores: Sequence[str], run_id: str, rollout_ids: Container[str], figures: "Mapping[str, _Figure] | None" = None
) -> Figures:
    """The figures of these stored rollouts of a run, of each the last attempt. Raises StoreError."""
    from trainspan_processing.dataset.ledger import NOTHING_USED
    from trainspan_processing.read.source import Selection, Source
    from trainspan_processing.traces.rollout_reader import stored_rollouts
    from trainspan_processing.traces.trace_index import index_traces

    last: dict[str, StoredRollout] = {}
    with Source(stores) as source:
        traces = index_traces(source, Selection(run_id), NOTHING_USED, now_ns=time.time_ns(), settle_s=0.0).heard()
        for (rollout_id, attempt), rollout in stored_rollouts(source, traces, traces.rollouts):
            is_last = rollout_id not in last or attempt > last[rollout_id].attempt
            if is_last and rollout_id in rollout_ids:
                last[rollout_id] = rollout
    collected = _Collected()
    has_tools = any(rollout.tools for rollout in last.values())
    for rollout in last.values():
        for name, (figure, _) in (figures or _OF_CALLS).items():
            if name != _TOOL_ERRORS or has_tools:
                collected.add(name, rollout.task_id or "", figure(rollout))
    return collected.values


def _answer_tokens(rollout: "StoredRollout") -> float | None:
    counts = [len(call.completion_ids) for call in rollout.calls]
    return float(sum(counts)) if any(counts) else None


def _calls(rollout: "StoredRollout") -> float | None:
    return float(len({call.index for call in rollout.calls}))


def _truncated(rollout: "StoredRollout") -> float | None:
    return fmean(call.finish_reason == "length" for call in rollout.calls)


def _last_text(rollout: "StoredRollout") -> str | None:
    main = [call for call in rollout.calls if call.kind == "main"] or rollout.calls
    return main[-1].text


def _refused(rollout: "StoredRollout") -> float | None:
    text = _last_text(rollout)
    return None if text is None else float(REFUSAL.match(text) is not None)


def _tool_errors(rollout: "StoredRollout") -> float | None:
    return float(sum(tool.failed for tool in rollout.tools))


_TOOL_ERRORS: Final = "tool errors per rollout"
_LEFT_OUT: Final = "left-out rollouts"
_GAP: Final = "reward above the check"
_NO_CALLS: Final = "no calls of both sides are stored"
_NO_GAP: Final = "no rollout of both sides has a reward, a text and a verdict of --check-judge"
_Figure = tuple[Callable[["StoredRollout"], float | None], str]
_OF_CALLS: Final[dict[str, _Figure]] = {
    "answer tokens per rollout": (_answer_tokens, "no token ids of both sides are stored"),
    "calls per rollout": (_calls, _NO_CALLS),
    "truncated answers": (_truncated, _NO_CALLS),
    "refusals": (_refused, "no text of both sides is recorded or can be decoded"),
    _TOOL_ERRORS: (_tool_errors, "no tool steps of both sides are recorded"),
}
"""Name → its value for a rollout, and why it may be unknown."""


def _left_out(outcomes: Evidence, used: Sequence[str], n: int) -> dict[str, list[float]]:
    ended = {task: len(outcomes.finished.get(task, ())) for task in used}
    return {task: [*[0.0] * count, *[1.0] * (n - count)] for task, count in ended.items()}


def _tripwire(name: str, sides: Sequence[Figures], missing: str | None) -> Tripwire:
    """Compares the sides on the tasks that have the figure under both; `missing` says why there may be none."""
    if len(sides) < 2:
        return Tripwire(name, None, None, unknown=missing)
    baseline, candidate = (one.get(name, {}) for one in sides)
    lower = compare(baseline, candidate, 0, shuffles=_SHUFFLES)
    if not lower.tasks:
        return Tripwire(name, None, None, unknown=missing)
    higher = compare(candidate, baseline, 0, shuffles=_SHUFFLES)
    p = min(1.0, 2 * min(lower.p, higher.p))
    return Tripwire(name, lower.before, lower.after, p <= _LEVEL, p)

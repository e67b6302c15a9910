"""What happens now: rollouts as they run, the newest calls, and what fails."""

from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, link, table
from trainspan_viewer.html.formats import age, count, number, seconds
from trainspan_viewer.queries.addresses import rollout_address
from trainspan_viewer.queries.live import WINDOW, LiveModel
from trainspan_viewer.queries.store import Row

__all__ = ["render_live"]


def render_live(model: LiveModel) -> Page:
    parts: list[Child] = [
        _facts(model),
        element(
            "p",
            f"The figures of the last minute count all rows; the lists below are from the newest {count(WINDOW)} rows of the store.",
            class_="note",
        ),
        element("p", "Spans have arrived that are not loaded yet: the figures are too low.", class_="warn")
        if model.is_behind
        else None,
        element("h2", "Running"),
        _running(model),
        element("h2", "Failures"),
        *_failures(model),
        element("h2", "Newest calls"),
        _calls(model),
        element("h2", "Newest rollouts that ended"),
        _finished(model),
    ]
    return Page("Live", [element("div", *parts, id="live")], section="live", live=model.params.link())


def _facts(model: LiveModel) -> Element:
    run = model.run
    rows: list[list[Child]] = [
        ["calls in the last minute", count(model.calls_per_minute)],
        ["tokens in the last minute", count(model.tokens_per_minute)],
        ["rollouts in the last minute", count(model.rollouts_per_minute)],
    ]
    if run is not None:
        rows += [
            ["run", link(f"/runs/{run.run_id}", run.run_id)],
            ["rounds done", f"{run.rounds_done} of {run.rounds}"],
            ["last validation", str(run.validations[-1].estimate) if run.validations else "–"],
            ["alarms", element("span", run.alarms, class_="bad") if run.alarms else "none"],
        ]
    return table(["", ""], rows, text=frozenset({0}), caption="now")


def _running(model: LiveModel) -> Child:
    if not model.running:
        return element("p", "No rollout is running.", class_="note")
    rows: list[list[Child]] = [
        [
            link(rollout_address(rollout.rollout_id, attempt=rollout.attempt), rollout.rollout_id[:16]),
            rollout.task_id or "–",
            rollout.calls,
            count(rollout.tokens),
            seconds((model.now_ns - rollout.began_ns) / 1e9),
            age((model.now_ns - rollout.last_ns) / 1e9),
        ]
        for rollout in model.running
    ]
    head = ("rollout", "task", "calls", "tokens", "for", "last call")
    return table(
        head, rows, text=frozenset({0, 1}), caption="rollouts with calls and without an end, last active first"
    )


def _failures(model: LiveModel) -> list[Child]:
    if not model.failures and not model.errors:
        return [element("p", "Nothing failed lately.", class_="note")]
    failed: list[list[Child]] = [
        [
            _rollout(row),
            row["task_id"] or "–",
            element("span", row["status"], class_="bad"),
            count(row["n_calls"]),
            _ago(model, row),
        ]
        for row in model.failures
    ]
    errors: list[list[Child]] = [
        [row["name"], row["service_name"] or "–", (row["status_message"] or "–")[:300], _ago(model, row)]
        for row in model.errors
    ]
    return [
        table(
            ("rollout", "task", "status", "calls", "ended"),
            failed,
            text=frozenset({0, 1, 2}),
            caption="failed rollouts",
        )
        if failed
        else None,
        table(("span", "service", "message", "ended"), errors, text=frozenset({0, 1, 2}), caption="spans with an error")
        if errors
        else None,
    ]


def _calls(model: LiveModel) -> Child:
    rows: list[list[Child]] = [
        [
            _rollout(row, f"/calls/{row['call_index']}" if row["has_own_index"] else ""),
            row["task_id"] or "–",
            "canary" if row["is_internal"] else row["agent"] or "–",
            count(row["call_index"]),
            _version(row),
            count(row["n_tokens"]),
            element("span", row["finish_reason"] or "–", class_="warn" if _is_cut(row) else None),
            "yes" if row["delivered"] else element("span", "no", class_="bad"),
            seconds((row["end_ns"] - row["start_ns"]) / 1e9) if row["end_ns"] else "–",
            _ago(model, row),
        ]
        for row in model.calls
    ]
    head = ("rollout", "task", "agent", "call", "version", "tokens", "finished by", "delivered", "took", "ended")
    if not rows:
        return element("p", "No calls yet.", class_="note")
    return table(head, rows, text=frozenset({0, 1, 2, 6}), caption="calls, newest first")


def _is_cut(row: Row) -> bool:
    """Whether an agent's answer met its limit; a canary always does."""
    return row["finish_reason"] == "length" and not row["is_internal"]


def _finished(model: LiveModel) -> Child:
    rows: list[list[Child]] = [
        [
            _rollout(row),
            row["task_id"] or "–",
            row["status"],
            number(row["reward"]),
            count(row["n_calls"]),
            f"{row['round'] if row['round'] is not None else '–'} {row['split'] or ''}",
            _ago(model, row),
        ]
        for row in model.finished
    ]
    head = ("rollout", "task", "status", "reward", "calls", "round", "ended")
    if not rows:
        return element("p", "No rollout has ended lately.", class_="note")
    return table(head, rows, text=frozenset({0, 1, 2, 5}), caption="rollouts, newest first")


def _rollout(row: Row, below: str = "") -> Child:
    if row["rollout_id"] is None:
        return "–"
    return link(rollout_address(row["rollout_id"], below, attempt=row["attempt"] or 0), row["rollout_id"][:16])


def _ago(model: LiveModel, row: Row) -> str:
    return age((model.now_ns - row["end_ns"]) / 1e9) if row["end_ns"] else "–"


def _version(row: Row) -> str:
    """The policy's version, after its name if it is one of several."""
    name = "" if row["policy_name"] in (None, "policy") else f"{row['policy_name']} "
    return f"{name}{count(row['policy_version'])}"

"""The explanation of a rollout in the terminal. Text by a model is never interpreted as markup or control characters."""

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from trainspan_processing.explain.account import CallAccount, ForeignAccount, RolloutAccount, ToolAccount

__all__ = ["print_explanation"]

_MOST_CHARACTERS = 1_200
"""Maximum length of one text, except with --full."""

_MOST_NAMED = 8
"""Branches or policies that are named in one line."""

_TEXTS = ("mean of", "sampled by", "run of branches")
"""Left-aligned columns."""

_WIDEST = 1_000
"""Maximum width of a table in columns."""

_SHADES = {
    "p": ("#e6f6e9", "#cdeed4", "#b0e4bc", "#90d9a1", "#6fcd86"),
    "n": ("#fdecea", "#fbd8d4", "#f8c0ba", "#f5a8a0", "#f28d83"),
}


def print_explanation(account: "RolloutAccount", *, full: bool) -> None:
    """Prints facts, calls, rewards, credit and text; with `full`, no text is shortened."""
    console = Console(markup=False, highlight=False, emoji=False)
    console.print(_facts(account), soft_wrap=True)
    if account.calls:
        console.print(_title("calls"))
        _print_whole(console, _calls(account))
    for reason in _untrained(account):
        console.print(_indented(reason), soft_wrap=True)
    console.print(_title("rewards"))
    for edge in _edges(account) or [Text("this rollout has no rewards", style="dim")]:
        console.print(_indented(edge), soft_wrap=True)
    if any(call.measured for call in account.calls):
        console.print(_title("measured by branches (no rewards)"))
        _print_whole(console, _measured(account))
    for branches in _branches(account):
        console.print(_indented(branches), soft_wrap=True)
    console.print(_title("credit"))
    for line in account.credit.lines:
        console.print(_indented(_plain(line)), soft_wrap=True)
    console.print(_title("text"), Text(_legend(account), style="dim"), soft_wrap=True)
    steps: list[tuple[float, Text]] = [(tool.start_s, _tool_text(tool, full=full)) for tool in account.tools]
    steps += [(call.start_s, _foreign_text(call, full=full)) for call in account.foreign]
    steps += [(call.start_s, _call_text(call, account, full=full)) for call in account.calls]
    for _, text in sorted(steps, key=lambda step: step[0]):
        console.print(text, soft_wrap=True)


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _indented(text: Text) -> Text:
    return Text("  ").append_text(text)


def _print_whole(console: Console, table: Table) -> None:
    """Prints the table without truncation: a narrow terminal wraps its lines."""
    width = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    if width <= console.width:
        console.print(table)
    else:
        Console(markup=False, highlight=False, emoji=False, width=width).print(table)


def _untrained(account: "RolloutAccount") -> list[Text]:
    """The reasons in full, each with its calls and what to do."""
    lines = []
    for group in account.untrained:
        calls = f"call{'' if len(group.calls) == 1 else 's'} {_ranges(group.calls)}"
        made_by = f" (client {', '.join(group.clients)})" if group.clients else ""
        lines.append(_plain(f"{calls}{made_by} not trained: {group.reason} → {group.advice}", "red"))
    return lines


def _ranges(numbers: list[int]) -> str:
    """Formats 0, 1, 2, 5 as `0–2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _plain(text: str, style: str = "") -> Text:
    from trainspan_processing.text.safe_text import visible

    return Text(visible(text), style=style)


def _facts(account: "RolloutAccount") -> Text:
    facts = [
        f"task {account.task_id}" if account.task_id else "",
        f"run {account.run_id}" if account.run_id else "",
        f"round {account.round}" if account.round is not None else "",
        f"attempt {account.attempt}" if account.attempt else "",
        f"split {account.split}" if account.split else "",
        account.status or "no status",
        f"{account.seconds:.3f} s" if account.seconds is not None else "",
    ]
    text = _plain(f"rollout {account.rollout_id}\n", "bold")
    text.append_text(_plain(" · ".join(filter(None, facts))))
    if branch := account.branch:
        attempt = f", attempt {branch.of.attempt}" if branch.of.attempt else ""
        summary = f"\na branch before call {branch.of.call} of rollout {branch.of.rollout_id}{attempt}; its answers: "
        text.append_text(_plain(f"{summary}{branch.repeated} repeated from there, {branch.sampled} sampled"))
    if account.answer is not None:
        text.append_text(_shortened(f"\nanswer of the task: {account.answer}", "", full=False))
    if account.error:
        text.append_text(_shortened(f"\nfailed: {account.error}", "red", full=False))
    if account.reason:
        text.append_text(_plain(f"\nnot trained: {account.reason}", "red"))
    for lack in account.lacks:
        text.append_text(_plain(f"\n  {lack.what}", "yellow"))
        text.append_text(_plain(f"\n  → {lack.advice}"))
    if account.verdict:
        text.append_text(_plain(f"\n{account.verdict}", "green" if account.agrees else "red"))
    return text


def _calls(account: "RolloutAccount") -> Table:
    from trainspan_processing.explain.arithmetic import number

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("agent", no_wrap=True)
    has_kinds = any(call.kind != "main" for call in account.calls)
    if has_kinds:
        table.add_column("kind", no_wrap=True)
    for name in ("ver", "prompt", "new", "out"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("finish", no_wrap=True)
    for name in ("seg←call", "r", "v", "A"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("trained", no_wrap=True)
    for call in account.calls:
        segment = "" if call.segment is None else str(call.segment)
        table.add_row(
            str(call.index),
            _plain(_cut(call.agent or "–")),
            *([_plain(call.kind)] if has_kinds else []),
            _plain(_version(call)),
            str(len(call.prompt_ids)),
            str(len(call.prompt_ids) - call.prefix_len),
            str(len(call.completion_ids)),
            _plain(call.finish_reason or "–"),
            segment if call.continues is None else f"{segment}←{call.continues}",
            number(call.step_reward),
            number(call.value),
            number(call.advantage),
            _plain(call.reason, "red") if call.reason else Text("yes"),
        )
    return table


def _version(call: "CallAccount") -> str:
    """The version, after the policy's name if it has one of its own."""
    version = "–" if call.policy_version is None else str(call.policy_version)
    return version if call.policy_name in (None, "policy") else f"{_cut(call.policy_name)} {version}"


def _kind(call: "CallAccount") -> str:
    return "" if call.kind == "main" else f"{call.kind} ({call.kind_rule}) · "


def _cut(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _edges(account: "RolloutAccount") -> list[Text]:
    from trainspan_processing.explain.arithmetic import number

    lines = []
    for edge in account.edges:
        target = "the rollout" if edge.call is None else f"call {edge.call}"
        where = f" on {edge.on}" if edge.on else ""
        at = f" at {edge.at_s:.3f} s" if edge.at_s is not None else ""
        statement = f"{number(edge.score)} {edge.name} from {edge.source}{where}{at}"
        if edge.rule is None:
            lines.append(_plain(f"{statement} does not count: {edge.why}", "yellow"))
        else:
            lines += [_plain(f"{statement} → {target}"), _plain(f"  rule {edge.rule}: {edge.why}", "dim")]
        if edge.explanation:
            lines.append(_shortened(f"  explanation: {edge.explanation}", "", full=False))
    return lines


def _measured(account: "RolloutAccount") -> Table:
    """The newest measurement of each call."""
    from trainspan_processing.explain.arithmetic import interval, number, run_of_branches

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (
        "#",
        "advantage",
        "95 %",
        "value before",
        "95 %",
        "mean of",
        "diverged",
        "sampled by",
        "run of branches",
    ):
        table.add_column(name, justify="left" if name in _TEXTS else "right", no_wrap=True)
    for call in account.calls:
        if call.measured:
            measurement = call.measured[0]
            table.add_row(
                str(call.index),
                number(measurement.advantage.score if measurement.advantage else None),
                interval(measurement.advantage),
                number(measurement.value.score if measurement.value else None),
                interval(measurement.value),
                measurement.source,
                "–" if measurement.diverged is None else str(measurement.diverged),
                _plain(", ".join(map(_cut, measurement.policies[:_MOST_NAMED])) or "–"),
                _plain("".join(run_of_branches(call.measured))),
            )
    return table


def _branches(account: "RolloutAccount") -> list[Text]:
    """Its branches, one line for each call and run."""
    branches: dict[tuple[int, str], list[str]] = {}
    for index, branch in account.branches:
        key = (branch.call if index is None else index, branch.run_id or "–")
        branches.setdefault(key, []).append(f"{branch.rollout_id} {branch.status}")
    return [
        _plain(
            f"{len(texts)} branch{'' if len(texts) == 1 else 'es'} before call {call} in run {run}: "
            + ", ".join(texts[:_MOST_NAMED])
            + (f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""),
            "dim",
        )
        for (call, run), texts in branches.items()
    ]


def _legend(account: "RolloutAccount") -> str:
    with_ = (
        f"decoded with {account.decoded_with}" if account.decoded_with else "token ids, since no tokenizer was found"
    )
    return f"{with_}; dim: given by the environment (mask 0); green and red: trained, by its advantage; struck: not trained"


def _call_text(call: "CallAccount", account: "RolloutAccount", *, full: bool) -> Text:
    from trainspan_processing.explain.arithmetic import number

    verdict = f"A = {number(call.advantage)}" if call.reason is None else f"not trained: {call.reason}"
    text = _plain(f"call {call.index} · {call.agent or '–'} · {_kind(call)}{verdict}\n", "bold")
    if call.broken:
        text.append_text(_plain(f"does not merge: {call.broken}\n", "yellow"))
    if call.prefix_len:
        text.append(f"⟨{call.prefix_len} tokens of call {call.continues} and before⟩ ", style="dim italic")
    new = call.prompt_ids[call.prefix_len :]
    given = call.prompt_text if call.prompt_text is not None else " ".join(map(str, new)) + " "
    text.append_text(_shortened(given, "dim", full=full))
    pieces = call.pieces if call.pieces is not None else [f"{token} " for token in call.completion_ids]
    text.append_text(_shortened("".join(pieces), _style(call, account.credit.greatest), full=full))
    text.append("\n")
    return text


def _foreign_text(call: "ForeignAccount", *, full: bool) -> Text:
    text = _plain(f"call to {call.model or 'a model'} · {call.agent or '–'} · not trained: {call.reason}\n", "bold")
    for message in (*call.messages, *([call.answer] if call.answer else [])):
        text.append_text(_shortened(f"{message.get('role', '?')}: {message.get('content') or ''}\n", "dim", full=full))
    return text


def _tool_text(tool: "ToolAccount", *, full: bool) -> Text:
    text = _plain(f"tool {tool.name}{' failed' if tool.failed else ''}\n", "bold red" if tool.failed else "bold yellow")
    for part in (tool.arguments, f"→ {tool.result}" if tool.result else None):
        if part:
            text.append_text(_shortened(f"{part}\n", "dim", full=full))
    return text


def _style(call: "CallAccount", greatest: float) -> str:
    from trainspan_processing.explain.shades import shade

    name = shade(call.advantage, greatest, trained=call.reason is None)
    if name == "u":
        return "strike"
    return "" if name == "z" else f"#1b1f24 on {_SHADES[name[0]][int(name[1]) - 1]}"


def _shortened(text: str, style: str, *, full: bool) -> Text:
    if full or len(text) <= _MOST_CHARACTERS:
        return _plain(text, style)
    half = _MOST_CHARACTERS // 2
    short = _plain(text[:half], style)
    short.append(f" ⟨{len(text) - 2 * half} characters, see --full or --html⟩ ", style="italic")
    short.append_text(_plain(text[-half:], style))
    return short

"""The quality report in the terminal: kept and dropped calls of a dataset, distributions of rewards and lengths."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from trainspan_processing.merging.unmerged import Unmerged
    from trainspan_processing.text.token_text import Decoder

__all__ = ["print_merge_failures", "print_quality"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_TITLES = {
    "reward": "reward",
    "advantage": "advantage",
    "calls_per_rollout": "rows / rollout",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "trained tokens",
}


def print_quality(manifest: Mapping[str, Any], place: str, *, was_there: bool, page: Path | None) -> None:
    """Prints the manifest of the dataset at `place`, a folder or URL; `page` is its report as HTML."""
    console = Console(markup=False, highlight=False, emoji=False)
    console.print(Text(f"{place}{' (was there already)' if was_there else ''}", style="italic"))
    console.print(_facts(manifest))
    if distributions := manifest.get("distributions"):
        console.print(_distributions(distributions))
    if page is not None:
        console.print(Text(f"report: {page}", style="dim"))


def print_merge_failures(found: "Sequence[tuple[int, Unmerged]]", place: str, decoder: "Decoder | None") -> None:
    """Prints the count of each cause in the dataset at `place` and its first example: the tokens as ids and as text."""
    from trainspan_processing.merging.divergence import EXPLANATIONS
    from trainspan_processing.text.safe_text import visible

    console = Console(markup=False, highlight=False, emoji=False)
    if not found:
        console.print("every call continues its agent's previous call, or is its first")
    if found and decoder is None:
        hint = (
            "no tokenizer was found, so causes are inferred from token ids alone: name a model directory with --model"
        )
        console.print(Text(hint, style="dim"), soft_wrap=True)
    for count, one in found:
        divergence = one.divergence
        calls = "1 call" if count == 1 else f"{count} calls"
        console.print(Text(f"\nnot merged: {divergence.cause} ({calls})", style="bold yellow"))
        explanation = EXPLANATIONS[divergence.cause]
        console.print(Text(f"{explanation.what} → {explanation.advice}"), soft_wrap=True)
        agent = f" of agent {one.agent}" if one.agent else ""
        where = f"rollout {one.rollout_id}: call {one.call_index}{agent} departs from call {one.after} at token {divergence.at}"
        shown = visible(f"{where}; see: trainspan explain {one.rollout_id} --dataset {place}")
        console.print(Text(shown), soft_wrap=True)
        sides = {
            "both": divergence.shared,
            f"call {one.after}": divergence.was,
            f"call {one.call_index}": divergence.now,
        }
        known = decoder if decoder and decoder.covers(token for ids in sides.values() for token in ids) else None
        for name, ids in sides.items():
            console.print(Text(f"  {name:>8}: {' '.join(map(str, ids)) or 'nothing'}"), soft_wrap=True)
            if known is not None and ids:
                console.print(Text(f"  {'':>8}  {visible(repr(known.text(ids)))}", style="dim"), soft_wrap=True)


def _facts(manifest: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rewards = manifest["rewards"]
    table.add_row("rollouts seen / kept", f"{manifest['rollouts_seen']} / {manifest['rollouts']}")
    table.add_row("groups seen / kept", f"{manifest['groups_seen']} / {manifest['groups']}")
    if spread := manifest.get("groups_spread"):
        table.add_row("  with all rewards equal", str(spread["zero_spread"]))
        table.add_row("  of one rollout", str(spread["singleton"]))
    table.add_row("calls seen", str(manifest["calls_seen"]))
    table.add_row("calls kept", str(manifest["calls_kept"]))
    for reason, count in manifest["dropped"].items():
        table.add_row(Text(f"  dropped: {reason}"), str(count))
    table.add_row("coverage", _share(manifest["coverage"]))
    if manifest["rollouts_without_calls"]:
        table.add_row("rollouts without calls", str(manifest["rollouts_without_calls"]))
    if manifest["pending"]["rollouts"]:
        table.add_row("rollouts still arriving", str(manifest["pending"]["rollouts"]))
    incomplete = manifest.get("groups_incomplete") or {}
    if incomplete.get("waiting"):
        table.add_row("groups waiting for their last rollouts", str(incomplete["waiting"]))
    if incomplete.get("taken"):
        table.add_row("groups taken without their last rollouts", str(incomplete["taken"]))
    if manifest.get("rewards_late"):
        table.add_row("rewards that came too late", str(manifest["rewards_late"]))
    if manifest["ignored_self_rewards"]:
        table.add_row("rollouts whose own rewards were ignored", str(manifest["ignored_self_rewards"]))
    if manifest["rewards_unmatched"]:
        shared = f", {several} responses have several" if (several := manifest.get("responses_ambiguous")) else ""
        table.add_row("rewards that match no rollout", f"{manifest['rewards_unmatched']}{shared}")
    if manifest.get("ignored_values"):
        table.add_row("measured values of another policy version or reward, not used", str(manifest["ignored_values"]))
    if (split := manifest.get("split_traces", {})).get("traces"):
        table.add_row("traces in several stores", Text(f"{split['traces']}, e.g. {split['examples'][0]['trace_id']}"))
    table.add_row("reward mean ± std", f"{_number(rewards['mean'])} ± {_number(rewards['std'])}")
    table.add_row("credit × baseline", Text(f"{manifest['credit']['credit']} × {manifest['credit']['baseline']}"))
    table.add_row("segments (merge ratio)", f"{manifest['segments']} ({_number(manifest['merge_ratio'])})")
    for cause, failed in manifest.get("merge_failures", {}).items():
        where = f"{failed['example']['rollout_id'][:12]} call {failed['example']['call_index']}"
        table.add_row(Text(f"  not merged: {cause}"), Text(f"{failed['calls']}, e.g. {where}"))
    table.add_row("policy versions", f"{manifest['min_policy_version']} – {manifest['max_policy_version']}")
    return table


def _distributions(distributions: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", style="bold", no_wrap=True)
    for name in ("min", "p10", "p50", "p90", "max"):
        table.add_column(name, justify="right")
    table.add_column("from min to max", no_wrap=True)
    for name, values in distributions.items():
        if values["n"]:
            shown = (_short(values[column]) for column in ("min", "p10", "p50", "p90", "max"))
            table.add_row(_TITLES.get(name, name), *shown, _sparkline(values["counts"]))
    return table


def _sparkline(counts: Sequence[int]) -> str:
    """One character per bin; only empty bins are blank."""
    greatest = max(counts, default=0)
    levels = len(_BLOCKS) - 1
    return "".join(_BLOCKS[-(-count * levels // greatest)] if count else " " for count in counts)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"

"""A dataset in the terminal: a summary of its quality, and where calls of an agent could not be merged."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from trainspan_processing.merging.unmerged import Unmerged
    from trainspan_processing.text.token_text import Decoder

__all__ = ["print_merge_failures", "print_quality"]


def print_quality(manifest: Mapping[str, Any], place: str, *, was_there: bool, page: Path | None) -> None:
    """Prints a summary of the dataset at `place`, a folder or URL; `page` is its report as HTML."""
    console = Console(markup=False, highlight=False, emoji=False)
    console.print(Text(f"{place}{' (was there already)' if was_there else ''}", style="italic"))
    for line in _summary(manifest):
        console.print(Text(line), soft_wrap=True)
    if page is not None:
        console.print(Text(f"report: {page}", style="dim"))


def print_merge_failures(failures: "Sequence[tuple[int, Unmerged]]", place: str, decoder: "Decoder | None") -> None:
    """Prints the count of each cause in the dataset at `place` and its first example: the tokens as ids and as text."""
    from trainspan_processing.merging.divergence import EXPLANATIONS
    from trainspan_processing.text.safe_text import visible

    console = Console(markup=False, highlight=False, emoji=False)
    if not failures:
        console.print("every call continues its agent's previous call, or is its first")
    if failures and decoder is None:
        hint = (
            "no tokenizer was found, so causes are inferred from token ids alone: name a model directory with --model"
        )
        console.print(Text(hint, style="dim"), soft_wrap=True)
    for count, example in failures:
        divergence = example.divergence
        calls = "1 call" if count == 1 else f"{count} calls"
        console.print(Text(f"\nnot merged: {divergence.cause} ({calls})", style="bold yellow"))
        explanation = EXPLANATIONS[divergence.cause]
        console.print(Text(f"{explanation.what} → {explanation.advice}"), soft_wrap=True)
        agent = f" of agent {example.agent}" if example.agent else ""
        where = f"rollout {example.rollout_id}: call {example.call_index}{agent} departs from call {example.after} at token {divergence.at}"
        shown = visible(f"{where}; see: trainspan explain {example.rollout_id} --dataset {place}")
        console.print(Text(shown), soft_wrap=True)
        sides = {
            "both": divergence.shared,
            f"call {example.after}": divergence.was,
            f"call {example.call_index}": divergence.now,
        }
        known = decoder if decoder and decoder.covers(token for ids in sides.values() for token in ids) else None
        for name, ids in sides.items():
            console.print(Text(f"  {name:>8}: {' '.join(map(str, ids)) or 'nothing'}"), soft_wrap=True)
            if known is not None and ids:
                console.print(Text(f"  {'':>8}  {visible(repr(known.text(ids)))}", style="dim"), soft_wrap=True)


def _summary(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What was kept and dropped, and counts that call for a look; the page has the distributions."""
    rewards, spread, credit = manifest["rewards"], manifest["groups_spread"], manifest["credit"]
    yield (
        f"rollouts kept: {manifest['rollouts']} of {manifest['rollouts_seen']}, in {manifest['groups']} of {manifest['groups_seen']} "
        f"groups ({spread['zero_spread']} with all rewards equal, {spread['singleton']} of one rollout)"
    )
    yield f"calls kept: {manifest['calls_kept']} of {manifest['calls_seen']} (coverage {_share(manifest['coverage'])})"
    if manifest["dropped"]:
        yield f"calls dropped: {_counts(manifest['dropped'])}"
    yield f"reward {_number(rewards['mean'])} ± {_number(rewards['std'])}, {credit['credit']} × {credit['baseline']}"
    failures = {cause: failed["calls"] for cause, failed in manifest["merge_failures"].items()}
    not_merged = f"; calls not merged: {_counts(failures)}" if failures else ""
    yield f"{manifest['segments']} segments (merge ratio {_number(manifest['merge_ratio'])}){not_merged}"
    yield f"policy versions: {manifest['min_policy_version']} to {manifest['max_policy_version']}"
    if also := {name: count for name, count in _odd(manifest).items() if count}:
        yield f"also: {_counts(also)}"


def _odd(manifest: Mapping[str, Any]) -> dict[str, int]:
    incomplete = manifest["groups_incomplete"]
    return {
        "rollouts without calls": manifest["rollouts_without_calls"],
        "rollouts still arriving": manifest["pending"]["rollouts"],
        "groups waiting for their last rollouts": incomplete["waiting"],
        "groups taken without their last rollouts": incomplete["taken"],
        "rewards that came too late": manifest["rewards_late"],
        "rollouts whose own rewards were ignored": manifest["ignored_self_rewards"],
        **{f"labels: {name.replace('_', ' ')}": n for name, n in manifest.get("labels", {}).items()},
        "rewards that match no rollout": manifest["rewards_unmatched"],
        "responses that several rollouts have": manifest["responses_ambiguous"],
        "measured values of another policy version or reward": manifest["ignored_values"],
        "claims of untrusted senders that were ignored": sum(manifest["ignored_claims"].values()),
        "traces in several stores": manifest["split_traces"]["traces"],
    }


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"

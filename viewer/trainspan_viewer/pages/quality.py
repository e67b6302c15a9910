"""The quality report as an HTML page: a pure function of the manifest, so that equal datasets have equal pages."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from trainspan_processing.credit.group_advice import group_advice
from trainspan_processing.reasons.advice import advice_on
from trainspan_schemas.artifacts.manifest import DatasetManifest
from trainspan_viewer.html.charts import bars, histogram
from trainspan_viewer.html.document import Page, standalone
from trainspan_viewer.html.elements import Child, Element, element, link, table
from trainspan_viewer.html.formats import number, share

__all__ = ["QUALITY_PAGE", "quality_body", "quality_page"]

QUALITY_PAGE: Final = "quality.html"

_TITLES: Final = {
    "reward": "rewards of the compared rollouts",
    "advantage": "advantages of the rows",
    "calls_per_rollout": "rows per rollout",
    "prompt_tokens": "prompt tokens per row",
    "completion_tokens": "completion tokens per row",
}


def quality_page(manifest: DatasetManifest) -> str:
    """A document with inline SVG and without scripts."""
    title = f"Dataset of round {manifest['round']}" + (f" of {manifest['run_id']}" if manifest["run_id"] else "")
    return standalone(Page(title, quality_body(manifest)))


def quality_body(manifest: DatasetManifest, link_of: Callable[[str], str] | None = None) -> list[Child]:
    """The quality of a dataset: what was seen, kept and dropped, groups, merging, and distributions.

    `link_of` is the address of the rollouts that lost calls for a reason.
    """
    spread, dropped = manifest["groups_spread"], manifest["dropped"]
    reason_counts = [
        ("kept", manifest["calls_kept"], "kept"),
        *((name, count, "lost") for name, count in dropped.items()),
    ]
    groups = [
        ("with contrast", spread["seen"] - spread["singleton"] - spread["zero_spread"], "kept"),
        ("all rewards equal", spread["zero_spread"], "lost"),
        ("of one rollout", spread["singleton"], "lost"),
    ]
    return [
        _facts(manifest),
        element("h2", "Calls and groups"),
        element("div", bars("calls by outcome", reason_counts), bars("groups of rollouts", groups), class_="plots"),
        *_reasons(dropped, manifest["credit"], link_of),
        *_merge_failures(manifest["merge_failures"]),
        element("h2", "Distributions"),
        element(
            "div",
            *(histogram(_TITLES[name], values) for name, values in manifest["distributions"].items()),
            class_="plots",
        ),
        _statistics(manifest["distributions"]),
    ]


def _facts(manifest: DatasetManifest) -> Element:
    credit, tokens = manifest["credit"], manifest["tokens"]
    rows: list[tuple[str, str]] = [
        ("rollouts seen / kept", f"{manifest['rollouts_seen']} / {manifest['rollouts']}"),
        ("groups seen / kept", f"{manifest['groups_seen']} / {manifest['groups']}"),
        ("calls seen / kept", f"{manifest['calls_seen']} / {manifest['calls_kept']}"),
        ("coverage", share(manifest["coverage"])),
        ("segments", f"{manifest['segments']} (merge ratio {share(manifest['merge_ratio'])})"),
        ("tokens", f"{tokens['completion']} trained, {tokens['environment']} of prompts and environment"),
        ("credit × baseline", f"{credit['credit']} × {credit['baseline']}"),
        ("policy versions", f"{manifest['min_policy_version']} to {manifest['max_policy_version']}"),
        ("rollouts without calls", str(manifest["rollouts_without_calls"])),
        ("rollouts still arriving", str(manifest["pending"]["rollouts"])),
        ("rollouts whose own rewards were ignored", str(manifest["ignored_self_rewards"])),
        *((f"labels: {name.replace('_', ' ')}", str(n)) for name, n in manifest.get("labels", {}).items()),
        ("rewards that match no rollout", str(manifest["rewards_unmatched"])),
        ("responses that several rollouts have", str(manifest["responses_ambiguous"])),
        ("measured values of another policy version or reward", str(manifest["ignored_values"])),
        ("claims of untrusted senders that were ignored", str(sum(manifest["ignored_claims"].values()))),
        ("traces in several stores", str(manifest["split_traces"]["traces"])),
        ("rewards that arrived after their rollout was used", str(manifest["rewards_late"])),
        ("groups waiting for their last rollouts", str(manifest["groups_incomplete"]["waiting"])),
        ("groups taken without their last rollouts", str(manifest["groups_incomplete"]["taken"])),
    ]
    return table(["", ""], [list(row) for row in rows], text=frozenset({0, 1}), caption="the dataset")


def _reasons(
    dropped: Mapping[str, int], credit: Mapping[str, Any], link_of: Callable[[str], str] | None
) -> list[Child]:
    if not dropped:
        return [element("p", "No call was dropped.")]
    baselines = [credit["baseline"], *(name.rpartition("+")[2] for name in credit["agents"].values())]
    special = group_advice(baselines, has_tasks=True)
    rows: list[list[Child]] = [
        [link(link_of(name), name) if link_of else name, count, special.get(name) or advice_on(name) or ""]
        for name, count in dropped.items()
    ]
    return [table(["dropped as", "calls", "what to do"], rows, text=frozenset({0, 2}), caption="drops by reason")]


def _merge_failures(failures: Mapping[str, Mapping[str, Any]]) -> list[Child]:
    """Calls that do not continue their agent's previous call, by cause, with the tokens of the first example of each."""
    if not failures:
        return []
    rows: list[list[Child]] = []
    for cause, failed in failures.items():
        example = failed["example"]
        where = f"rollout {example['rollout_id']}: call {example['call_index']} after call {example['after']}"
        sides = {"both have": "shared", "then it was": "earlier", "and became": "prompt"}
        examples = [element("div", f"{name} {' '.join(map(str, example[side]))}") for name, side in sides.items()]
        tokens = element("details", element("summary", f"{where}, at token {example['differs_at']}"), *examples)
        rows.append([cause, failed["calls"], tokens])
    return [
        table(["not merged because of", "calls", "for example (see trainspan explain)"], rows, text=frozenset({0, 2}))
    ]


def _statistics(distributions: Mapping[str, Mapping[str, Any]]) -> Element:
    columns = ["n", "mean", "std", "min", "p10", "p50", "p90", "max"]
    rows: list[list[Child]] = [
        [_TITLES[name], *(number(values[column]) for column in columns)] for name, values in distributions.items()
    ]
    return table(["", *columns], rows)

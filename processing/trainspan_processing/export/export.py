"""Reads the rollouts of a dataset or a store, makes examples from them, and writes the file."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import polars as pl

from trainspan_processing.credit.plan import looks_at_calls
from trainspan_processing.dataset.ledger import NOTHING_USED
from trainspan_processing.dataset.published import Published
from trainspan_processing.export.atif import trajectories
from trainspan_processing.export.candidates import Examples, RewardedRollout, reaches
from trainspan_processing.export.conversations import RecordedCall, read_conversations
from trainspan_processing.export.dpo import preference_pairs
from trainspan_processing.export.kto import judged_examples
from trainspan_processing.export.labeled_pairs import LabeledPair, labeled_pairs
from trainspan_processing.export.sft import supervised_examples
from trainspan_processing.export.token_rows import token_rows, training_traces
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.reasons.advice import NO_ROLLOUT_NAMED, advice_on
from trainspan_processing.reasons.selection import select
from trainspan_processing.rewards.rollout_rewards import reward_rollouts
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_processing.text.chat_messages import same_messages
from trainspan_processing.text.token_text import Decoder
from trainspan_processing.traces.trace_index import Clock, index_traces
from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.artifacts.dataset import MANIFEST, manifest_path
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import DatasetError, UsageError
from trainspan_schemas.files.durable import JsonObject

__all__ = ["CHOOSING", "ExportRequest", "Exported", "Kind", "export"]

Kind = Literal["sft", "dpo", "kto", "atif", "openenv", "rows"]
CHOOSING: Final = ("sft", "dpo", "kto")
"""The kinds that choose examples by reward and group. In the others each rollout has lines of its own."""

_NO_TEXT: Final = (
    "no client instrumentation recorded the messages: install trainspan[messages] in the agent's environment (for the openai "
    "package; other clients need their instrumentation, and OpenTelemetry's own ones the setting "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true) and run the agent again, or decode the tokens of a dataset with "
    "--form text"
)


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A request for an export."""

    kind: Kind
    out: Path
    stores: Sequence[str]
    """Stores with the messages, as paths or grpc:// addresses."""
    datasets: Sequence[Published]
    """Export their rollouts with their rewards; none: all complete rewarded rollouts of the stores."""
    settings: DatasetSettings
    """Choose a store's rollouts (`split`, `filter`, `admit`) and determine their rewards."""
    run_id: str | None = None
    round: int | None = None
    min_reward: float | None = None
    agents: frozenset[str] = frozenset()
    """Only these agents' calls; empty: all."""
    take_all: bool = False
    """For sft: all rollouts of a group with at least `min_reward`, or with its highest reward, instead of the shortest best one."""
    decoder: Decoder | None = None
    """Decode text from token ids instead of using recorded messages; needs datasets."""

    def source(self) -> JsonObject:
        """What the examples are made from, as the manifest names it."""
        manifests = {str(dataset.path): manifest_path(dataset.path).read_bytes() for dataset in self.datasets}
        hashes = {path: hashlib.sha256(manifest).hexdigest() for path, manifest in manifests.items()}
        return {**({"datasets": hashes} if hashes else {}), "stores": list(self.stores)}


@dataclass(frozen=True, slots=True)
class Exported:
    """A written file."""

    path: Path
    examples: int
    groups: int
    groups_used: int
    skipped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Labeled:
    """The pairs that a person compared, and the number of those that are left out, by reason."""

    pairs: Sequence[LabeledPair] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> frozenset[tuple[str, int]]:
        return frozenset(key for pair in self.pairs for key in pair)


def export(request: ExportRequest, clock: Clock) -> Exported:
    """Writes `out` (JSON lines) and `out`.manifest.json.

    Raises UsageError if `out` exists, DatasetError if the rollouts give no example, StoreError if a store cannot be read.
    """
    if request.out.exists():
        raise UsageError(f"{request.out} exists: remove it, or choose another name")
    if request.kind not in CHOOSING:
        examples = Examples()
        return _write(request, examples, _lines(request, clock, examples))
    if request.decoder is not None and not request.datasets:
        raise UsageError("--form text decodes the tokens of a dataset's rows: name a dataset, not a store")
    if request.decoder is not None:
        candidates, labeled = _candidates_of(request), _Labeled()
        if request.kind == "dpo" and any(
            dataset.manifest.get("labels", {}).get("preferences") for dataset in request.datasets
        ):
            with Source(request.stores, allow_behind=True) as source:
                labeled = _Labeled(*labeled_pairs(source, _seen(request)))
        calls_of = _decoded(request, request.decoder, _wanted(request, candidates) | labeled.keys)
        examples = _examples(request, candidates, calls_of, labeled)
    else:
        with Source(request.stores, allow_behind=True) as source:
            rollouts = _seen(request) if request.datasets else _rewarded_in(source, request, clock)[0]
            candidates = _candidates_of(request) if request.datasets else _candidates_in(rollouts)
            labeled = _Labeled(*labeled_pairs(source, rollouts)) if request.kind == "dpo" else _Labeled()
            if not candidates and not labeled.pairs and not request.datasets:
                raise DatasetError(_nothing_in(source, request, clock))
            keys = sorted({each.key for each in candidates} | labeled.keys)
            examples = _examples(request, candidates, dict(read_conversations(source, keys)), labeled)
    return _write(request, examples, examples.rows)


def _lines(request: ExportRequest, clock: Clock, examples: Examples) -> Iterator[JsonObject]:
    """The lines of a kind that does not choose, made one after another; fills in the rest of `examples`."""
    if request.kind == "atif":
        with Source(request.stores, allow_behind=True) as source:
            rollouts = _seen(request) if request.datasets else _rewarded_in(source, request, clock)[0]
            if rollouts.is_empty():
                raise DatasetError(_nothing_in(source, request, clock))
            yield from trajectories(source, rollouts, request.agents, examples)
        return
    if not request.datasets:
        raise UsageError(f"export {request.kind} writes the tokens of a dataset's rows: name a dataset, not a store")
    lines_of = token_rows if request.kind == "rows" else training_traces
    yield from lines_of(request.datasets, request.agents, examples)


def _examples(
    request: ExportRequest,
    candidates: Sequence[RewardedRollout],
    calls_of: Mapping[tuple[str, int], Sequence[RecordedCall]],
    labeled: _Labeled,
) -> Examples:
    groups: dict[str, list[RewardedRollout]] = {}
    for candidate in candidates:
        groups.setdefault(_group_of(candidate, calls_of.get(candidate.key, ()), request.kind), []).append(candidate)
    limits: JsonObject = {"min_reward": request.min_reward, "agents": request.agents}
    if request.kind == "dpo":
        pairs = preference_pairs(groups, lambda key: calls_of.get(key, ()), **limits, labeled=labeled.pairs)
        pairs.skipped.update(labeled.skipped)
        return pairs
    if request.kind == "kto":
        return judged_examples(groups, lambda key: calls_of.get(key, ()), **limits)
    return supervised_examples(groups, lambda key: calls_of.get(key, ()), **limits, take_all=request.take_all)


def _group_of(candidate: RewardedRollout, calls: Sequence[RecordedCall], kind: Kind) -> str:
    """The group; a rollout without a task is alone in it, or for pairs and verdicts with those that began with the same prompt."""
    if candidate.has_task:
        return candidate.group
    if kind != "sft" and calls:
        prompt = calls[0].prompt
        return json.dumps([candidate.group, prompt if isinstance(prompt, str) else same_messages(prompt)])
    return json.dumps([candidate.group, *candidate.key])


def _why(examples: Examples) -> str:
    if not examples.groups:
        return "the dataset compared no rollout"
    if examples.skipped["no_text"] or examples.skipped["labeled_no_text"]:
        return _NO_TEXT
    return ", ".join(f"{reason} {count}" for reason, count in examples.skipped.most_common())


def _candidates_of(request: ExportRequest) -> list[RewardedRollout]:
    """The rollouts that the datasets compared, including rollouts that had nothing to be compared with."""
    return _grouped(_seen(request).filter(pl.col("reward").is_not_null()))


def _seen(request: ExportRequest) -> pl.DataFrame:
    """The rollouts of all datasets, each once, as the newest dataset has it: its reward may have arrived late."""
    lines = pl.concat(dataset.seen() for dataset in request.datasets)
    return lines.unique(ROLLOUT_KEY, keep="last", maintain_order=True)


def _candidates_in(rollouts: pl.DataFrame) -> list[RewardedRollout]:
    return _grouped(rollouts.filter(pl.col("reason").is_null()).sort("rollout_id", "attempt"))


def _nothing_in(source: Source, request: ExportRequest, clock: Clock) -> str:
    """Why no rollout of a store can be exported, and what to do."""
    rollouts, n_traces = _rewarded_in(source, request, clock)
    if rollouts.is_empty() and not n_traces:
        return f"{', '.join(request.stores)}: nothing is stored of this selection: run the agent, or name another --store, --run or --round"
    if rollouts.is_empty():
        return f"the spans of {n_traces} traces name no rollout: {NO_ROLLOUT_NAMED}"
    counts = Counter(rollouts["reason"].drop_nulls().to_list()).most_common()
    reasons = "; ".join(
        f"{reason} {count} → {advice_on(reason) or 'see docs/processing.md'}" for reason, count in counts
    )
    return f"none of {rollouts.height} rollouts can be an example: {reasons or 'all are branches'}"


def _rewarded_in(source: Source, request: ExportRequest, clock: Clock) -> tuple[pl.DataFrame, int]:
    """The selected rollouts with their reasons, and the number of traces."""
    selection = Selection(request.run_id, request.round)
    traces = index_traces(source, selection, NOTHING_USED, now_ns=clock.now_ns(), settle_s=request.settings.settle_s)
    traces = select(source, traces, request.settings)
    # The policy server has no calls of a vendor's model: a rollout whose own span is stored has ended.
    ended = pl.col("status").is_not_null()
    known = traces.rollouts.with_columns(ended.alias("complete"), (pl.col("pending") & ~ended).alias("pending"))
    chosen, by_call = replace(traces, rollouts=known), looks_at_calls(request.settings)
    rollouts = reward_rollouts(source, chosen, request.settings, of_calls_count=by_call).rollouts
    return rollouts, traces.spans["trace_id"].n_unique()


def _grouped(rollouts: pl.DataFrame) -> list[RewardedRollout]:
    """Rollouts with the run, round and task by which they are grouped.

    Branches are left out: their first answers are those of the rollout that they branch from, sampled there, and their states
    are not a task's usual ones.
    """
    rollouts = rollouts.filter(~pl.col("task_id").str.contains(BRANCH_TASK).fill_null(value=False))
    columns = ["rollout_id", "attempt", "run_id", "round", "task_id", "reward"]
    return [
        RewardedRollout(
            rollout_id,
            attempt,
            json.dumps([run_id, round_, task_id]),
            reward,
            task_id is not None,
        )
        for rollout_id, attempt, run_id, round_, task_id, reward in rollouts.select(columns).iter_rows()
    ]


def _wanted(request: ExportRequest, candidates: Sequence[RewardedRollout]) -> frozenset[tuple[str, int]]:
    """The rollouts of which an example may be made, as far as one can tell without their text."""
    least = -math.inf if request.kind != "sft" or request.min_reward is None else request.min_reward
    return frozenset(candidate.key for candidate in candidates if reaches(candidate.reward, least))


def _decoded(
    request: ExportRequest, decoder: Decoder, wanted: frozenset[tuple[str, int]]
) -> dict[tuple[str, int], list[RecordedCall]]:
    """The rows of the wanted rollouts as text. Where the text is not that of the sampled tokens alone, they have a flaw."""
    calls_of: dict[tuple[str, int], list[RecordedCall]] = {}
    columns = ["rollout_id", "attempt", "agent", "policy_name", "prompt_ids", "completion_ids", "finish_reason"]
    for dataset in request.datasets:
        for rows in dataset.files(columns):
            for rollout_id, attempt, agent, model, prompt, completion, finish in rows.iter_rows():
                if (rollout_id, attempt) not in wanted:
                    continue
                if not decoder.covers(prompt) or not decoder.covers(completion):
                    raise DatasetError(
                        f"the vocabulary of {decoder.model} differs from that of the rows of {dataset.path}: "
                        "name the model that sampled them"
                    )
                texts = decoder.text(prompt), decoder.text(completion)
                exact = [decoder.ids(text) for text in texts] == [list(prompt), list(completion)]
                call = RecordedCall(agent, model, *texts, finish != "length", None if exact else "other_tokens")
                calls_of.setdefault((rollout_id, attempt), []).append(call)
    return calls_of


def _write(request: ExportRequest, examples: Examples, lines: Iterable[JsonObject]) -> Exported:
    """Writes the lines under a temporary name, then the manifest, and then renames the file. Raises DatasetError if there is none."""
    request.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = request.out.with_name(f".{request.out.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for row in lines:
                file.write(_json(row, is_strict=request.kind not in CHOOSING) + "\n")
        n_lines = len(examples.sources)
        if not n_lines:
            unit = "groups" if request.kind in CHOOSING else "rollouts"
            raise DatasetError(f"{examples.groups} {unit} contain no example: {_why(examples)}")
        manifest_file = request.out.with_name(f"{request.out.name}.{MANIFEST}")
        manifest_file.write_text(json.dumps(_manifest(request, examples), indent=2) + "\n", encoding="utf-8")
        temporary.replace(request.out)
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(request.out, n_lines, examples.groups, examples.groups_used, dict(examples.skipped.most_common()))


def _json(row: JsonObject, *, is_strict: bool) -> str:
    """Raises DatasetError if a number is NaN or infinite, which JSON lacks; the arguments of a tool call may be as the model wrote them."""
    try:
        return json.dumps(row, ensure_ascii=True, allow_nan=not is_strict)
    except ValueError as error:
        name = row.get("trajectory_id") or row.get("rollout_id") or row["turns"][0]["metadata"]["rollout_id"]
        raise DatasetError(f"rollout {name} has a number that is NaN or infinite, which JSON lacks: {error}") from error


def _manifest(request: ExportRequest, examples: Examples) -> JsonObject:
    return {
        "kind": request.kind,
        "source": request.source(),
        "run_id": request.run_id,
        "round": request.round,
        "min_reward": request.min_reward,
        "all": request.take_all,
        "agents": sorted(request.agents),
        "decoded_with": request.decoder.model if request.decoder else None,
        "examples": len(examples.sources),
        "groups": examples.groups,
        "groups_used": examples.groups_used,
        "skipped": dict(examples.skipped.most_common()),
        "sources": examples.sources,
    }

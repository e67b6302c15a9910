"""Builds one dataset: index, rewards, credit, rows, manifest; then publishes it whole."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import polars as pl

from trainspan_processing.assembly.chunks import Assembly, assemble
from trainspan_processing.assembly.manifest import make_manifest
from trainspan_processing.assembly.parts import WritePart
from trainspan_processing.assembly.recorded import Recorded
from trainspan_processing.assembly.rows import RowCounts, add_counts
from trainspan_processing.credit.group_advice import group_advice
from trainspan_processing.dataset.ledger import DatasetLedger, Earlier, next_round, read_ledger, write_ledger
from trainspan_processing.dataset.mirror import Mirror
from trainspan_processing.dataset.parquet import FileEntry, write_manifest
from trainspan_processing.dataset.scratch import Scratch, local_scratch, remote_scratch
from trainspan_processing.read.engine import Engine, OneProcess
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.split_traces import split_traces
from trainspan_processing.reasons.coverage import (
    EXPECTED,
    Coverage,
    check_outcome,
    check_policies,
    late_calls,
    late_evaluations,
    ledger_lines,
    lines_to_write,
    measure_coverage,
)
from trainspan_processing.reasons.reason_examples import Reason, describe_reasons, first_examples
from trainspan_processing.rewards.definition import reward_digest
from trainspan_processing.traces.trace_index import Clock
from trainspan_schemas.artifacts.dataset import MANIFEST, dataset_dir, manifest_path, round_of
from trainspan_schemas.artifacts.manifest import DatasetManifest
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import DatasetError, UsageError

__all__ = ["BuildRequest", "BuiltDataset", "build_dataset"]


_LATE: Final = pl.lit("late_after_consumed").alias("reason")


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """A request to build a dataset."""

    stores: Sequence[str]
    """Paths or grpc:// addresses."""
    out: Path
    """Folder of datasets; with `mirror`, its folder `known`."""
    settings: DatasetSettings
    run_id: str | None = None
    round: int | None = None
    """Only this round's rollouts; also the dataset's number. None: the next free number."""
    since_round: int | None = None
    """Only rollouts of this round or later."""
    since_seq: Sequence[int] | None = None
    """Only rollouts that came after this place (`seq`) into the store: one for each store, in their order."""
    allow_behind: bool = False
    number: int | None = None
    """The dataset's number; None: the round, else the next free one."""
    mirror: Mirror | None = None
    """Publish under this URL."""
    recorded: Recorded | None = None
    """Build from this earlier view of the stores. None: everything in the stores now that no dataset in `out` used."""

    @property
    def target(self) -> Path:
        """The dataset's folder, which may exist already."""
        given = self.number if self.number is not None else self.round
        return dataset_dir(self.out, next_round(self.out) if given is None else given)


Pages = Mapping[str, Callable[[DatasetManifest], str]]
"""File name → function from the manifest to the file's text."""


@dataclass(frozen=True, slots=True)
class BuiltDataset:
    """A published dataset."""

    path: Path
    """Its folder; if it is under a URL, the folder in `known`, without rows."""
    manifest: DatasetManifest
    sha256: str
    """Hash of the manifest file: the dataset's identity."""
    place: str
    """The folder, or the URL under which it was published."""
    was_there: bool
    """Whether it had already been built with the same settings and was left unchanged."""


def build_dataset(
    request: BuildRequest, clock: Clock, pages: Pages | None = None, engine: Engine | None = None
) -> BuiltDataset:
    """Builds the dataset and publishes its folder, with `pages` next to the manifest.

    `engine` computes chunks and files, by default this process; the bytes do not depend on it.

    Raises NothingToTrainError if no call or too few calls are trainable, DatasetError if the folder is in the way or the
    calls come from several policies, StoreError if a store cannot be read, UsageError if a credit, baseline or function
    is unknown.
    """
    if request.since_seq is not None and len(request.since_seq) != len(request.stores):
        raise UsageError(
            f"{len(request.since_seq)} places since_seq for {len(request.stores)} stores: name one for each"
        )
    engine = engine or OneProcess()
    if request.mirror is not None:
        request.mirror.refresh(with_ledgers=True)
    target = request.target
    if target.exists():
        return _existing(target, request)
    settings, is_round = request.settings, request.round is not None
    recorded = request.recorded
    selection = Selection(request.run_id, request.round, since_round=request.since_round, since_seq=request.since_seq)
    opened = Source(request.stores, request.allow_behind)
    if recorded is not None:
        selection, clock = recorded.selection, recorded.clock(clock)
        opened = recorded.open(request.stores, allow_behind=request.allow_behind)
    ledger = read_ledger(request.out) if recorded is None else recorded.earlier
    with opened as source, _scratch(request, target, engine) as scratch:
        # A round has no later dataset that could take rollouts left out of this one.
        assembly = assemble(
            engine, source, selection, settings, ledger, clock, scratch.calls, may_leave_groups=not is_round
        )
        rows = _write_rows(engine, source, assembly, scratch)
        coverage, rewards_late = _write_ledger(request, source, assembly, rows, ledger, scratch.about)
        manifest = make_manifest(
            number=round_of(target.name) or 0,
            coverage=coverage,
            counts=rows.counts,
            assembly=assembly,
            rewards_late=rewards_late,
            files=rows.files,
            folder=scratch.about,
            settings=_settings_record(request),
            inputs=[
                {"store": store, "watermark": source.watermarks.get(number, 0)}
                for number, store in enumerate(request.stores)
            ],
            split=split_traces(source, selection),
            earlier=Earlier.of(ledger.files),
        )
        write_manifest(scratch.about / MANIFEST, manifest)
        for name, write in (pages or {}).items():
            (scratch.about / name).write_text(write(manifest), encoding="utf-8")
        scratch.publish()
    return _opened(target, request, was_there=False)


def _scratch(request: BuildRequest, target: Path, engine: Engine) -> AbstractContextManager[Scratch]:
    if request.mirror is None:
        return local_scratch(target)
    return remote_scratch(request.mirror, target, is_spread=engine.is_spread)


@dataclass(frozen=True, slots=True)
class _WrittenRows:
    files: list[FileEntry]
    counts: RowCounts
    reason_counts: pl.DataFrame
    """REASON_COUNTS of all calls with tokens."""
    examples: pl.DataFrame
    """EXAMPLES of the reasons that need tokens."""


def _write_rows(engine: Engine, source: Source, assembly: Assembly, scratch: Scratch) -> _WrittenRows:
    counts, files, reason_counts = RowCounts(), [], [assembly.reason_counts]
    examples = first_examples()
    for part in engine.map(source, WritePart(assembly.limits, scratch.calls, scratch.rows), assembly.files()):
        files.append(part.file)
        add_counts(counts, part.counts)
        reason_counts.append(part.reason_counts)
        examples = first_examples(examples, part.examples)
    return _WrittenRows(files, counts, pl.concat(reason_counts), examples)


def _write_ledger(
    request: BuildRequest, source: Source, assembly: Assembly, rows: _WrittenRows, ledger: DatasetLedger, folder: Path
) -> tuple[Coverage, int]:
    """Writes the lines of the rollouts; returns the coverage, and the number of rewards that came too late.

    Raises NothingToTrainError if too few calls are trainable, DatasetError if they come from several policies.
    """
    settings, is_round = request.settings, request.round is not None
    shares = assembly.shares if assembly.plan.needs_history else assembly.shares.clear()
    lines = ledger_lines(rows.reason_counts, assembly.others, assembly.rollouts, shares, ledger, recount=is_round)
    late = late_calls(assembly.used, ledger)
    late_rewards = late_evaluations(assembly.evaluations, ledger)
    coverage = measure_coverage(rows.reason_counts, assembly.others, lines, late)

    def reasons() -> list[Reason]:
        return describe_reasons(
            source,
            coverage.dropped,
            EXPECTED,
            first_examples(assembly.examples, rows.examples, late.with_columns(_LATE)),
            _special_advice(assembly),
            now_ns=assembly.as_of_ns,
            settle_s=settings.settle_s,
        )

    check_outcome(coverage, settings, _where(request), reasons, may_be_empty=is_round)
    check_policies(rows.counts.policies, _where(request))
    digest = pl.when(pl.col("reward").is_not_null()).then(pl.lit(reward_digest(settings)))
    lines = lines.join(assembly.evaluations, on="rollout_id", how="left", maintain_order="left").with_columns(
        pl.col("evaluations", "rewards").fill_null(0), digest.alias("reward_digest")
    )
    write_ledger(folder, lines_to_write(lines, late, late_rewards, ledger))
    return coverage, int(late_rewards["late"].sum())


def _special_advice(assembly: Assembly) -> dict[str, str]:
    """Advice by reason that replaces the usual advice."""
    has_tasks = bool(assembly.compared["task_id"].is_not_null().any())
    special = group_advice(assembly.plan.baselines, has_tasks=has_tasks)
    if assembly.function_error:
        special["judge_error"] = f"the reward function {assembly.function_error}"
    return special


def _where(request: BuildRequest) -> str:
    stores = " and ".join(request.stores)
    run = f"run {request.run_id} of " if request.run_id else ""
    if request.round is not None:
        return f"round {request.round} of {run}{stores}"
    return (
        f"{run}{stores}" if request.since_round is None else f"round {request.since_round} and later of {run}{stores}"
    )


def _settings_record(request: BuildRequest) -> dict[str, object]:
    """The settings that determine the rows, together with the stores and the ledger."""
    passing = ("out", "wait_s", "reward_concurrency", "engine")
    chosen = {key: value for key, value in asdict(request.settings).items() if key not in passing}
    since = {"since_round": request.since_round, "since_seq": request.since_seq and list(request.since_seq)}
    since = {name: value for name, value in since.items() if value is not None}
    return {**chosen, "run_id": request.run_id, "round": request.round, **since}


def _existing(target: Path, request: BuildRequest) -> BuiltDataset:
    """The dataset already at `target`. A published dataset never changes: its consumers identify it by its hash."""
    there = _opened(target, request, was_there=True)
    if there.manifest.get("settings") != _settings_record(request):
        raise DatasetError(f"{there.place} was built with other settings: choose another --out, or move it away")
    return there


def _opened(target: Path, request: BuildRequest, *, was_there: bool) -> BuiltDataset:
    try:
        content = manifest_path(target).read_bytes()
        manifest: DatasetManifest = json.loads(content)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{target} exists but is not a dataset ({error}): move it away") from error
    location = str(target) if request.mirror is None else f"{request.mirror.url}/{target.name}"
    return BuiltDataset(target, manifest, hashlib.sha256(content).hexdigest(), location, was_there)

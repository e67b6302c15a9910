"""Reduces a chunk to a summary in memory, and spills its calls to files until rows are written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.assembly.chunk import reward_chunk
from trainspan_processing.assembly.rows import newest_version
from trainspan_processing.credit.plan import looks_at_calls
from trainspan_processing.dataset.files import Files, RemoteFiles
from trainspan_processing.read.source import Source
from trainspan_processing.reasons.drop_reasons import admitted_reasons
from trainspan_processing.reasons.reason_counts import count_reasons
from trainspan_processing.reasons.reason_examples import first_examples
from trainspan_processing.reasons.selection import admitted_evaluations
from trainspan_processing.rewards.evaluation_rewards import count_rewards
from trainspan_processing.rewards.names import RewardName
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY, compact
from trainspan_processing.traces.evaluations import contested, count_evaluations
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["ChunkSummary", "Spill", "read_spilled"]

_OF_ROLLOUT: Final = [*ROLLOUT_KEY, "run_id", "round", "task_id", "judge", "reward", "end_ns"]
_OF_CALL: Final = [
    *("rollout", "store", "seq", *SPAN_KEY, *ROLLOUT_KEY, "run_id", "round", "task_id", "agent", "call_kind"),
    *("call_index", "next_index", "turn"),
    *("position", "policy_name", "base", "policy_version", "policy_version_spans", "finish_reason", "temperature"),
    *("logprobs_mode", "tokens_source", "group_id", "reason", "reward", "n_tokens", "response_id", "constrained"),
]


@dataclass(frozen=True, slots=True)
class ChunkSummary:
    """The part of a chunk that stays in memory."""

    rollouts: pl.DataFrame
    compared: pl.DataFrame
    credited: list[pl.DataFrame]
    """One frame, removed when all chunks are combined."""
    reason_counts: pl.DataFrame
    examples: pl.DataFrame
    others: pl.DataFrame
    rewards: Sequence[RewardName]
    newest: int | None
    calls: int
    evaluations: pl.DataFrame
    """COUNTED and COUNTED_REWARDS."""
    ignored_self_rewards: int
    labels: Mapping[str, int]
    """The counts of LabelEdges."""
    unmatched: int
    contested: frozenset[str]
    """Responses of several rollouts that late feedback names."""
    ignored_values: int
    ignored_claims: dict[str, int]
    """Claim → rollouts of which someone says so who is not heard."""
    function_error: str | None


@dataclass(frozen=True, slots=True)
class Spill:
    """Rewards the rollouts of one chunk, and writes their sound calls to a folder under the number of the chunk."""

    settings: DatasetSettings
    folder: Files
    with_state: bool

    def __call__(self, source: Source, traces: TraceIndex, number: int) -> ChunkSummary:
        return _spill(source, traces, self.settings, self.folder, number, with_state=self.with_state)


def _spill(
    source: Source, traces: TraceIndex, settings: DatasetSettings, folder: Files, number: int, *, with_state: bool
) -> ChunkSummary:
    chunk = reward_chunk(source, traces, settings, with_state=with_state)
    names = [reward.name for reward in chunk.rewarded.rewards]
    is_sound = pl.col("reason").is_null()
    sound = chunk.calls.filter(is_sound).select(_OF_CALL).rename({"rollout": "in_part"})
    for frame, name in zip((sound, traces.answers), _names(number), strict=True):
        with folder.filling(name) as unfinished:
            frame.write_ipc(unfinished, compression="lz4" if isinstance(folder, RemoteFiles) else "uncompressed")
    counted = sound.group_by(pl.col("in_part").alias("rollout")).agg(
        pl.len().cast(pl.UInt32).alias("sound"), pl.col("n_tokens").sum().alias("tokens")
    )
    compared = chunk.compared.select("rollout", *_OF_ROLLOUT, "group_id").join(
        counted, on="rollout", how="left", maintain_order="left"
    )
    numbered = compared.with_columns(
        pl.lit(number, dtype=pl.UInt32).alias("part"), pl.col("sound", "tokens").fill_null(0)
    )
    # The frames that stay must not keep alive the texts that they were sliced from.
    return ChunkSummary(
        rollouts=compact(
            chunk.rewarded.judged.select(
                *_OF_ROLLOUT,
                "split",
                "status",
                "group_size",
                "pending",
                "by_runner",
                "is_signed",
                "reason",
                "function_rewards",
                "labeled",
            )
        ),
        compared=compact(numbered),
        # Few names, many calls.
        credited=[compact(chunk.credited).with_columns(pl.col("^(agent|call_kind)$").cast(pl.Categorical))],
        reason_counts=compact(count_reasons(chunk.calls.filter(~is_sound))),
        examples=first_examples(chunk.calls),
        others=compact(
            chunk.others.select(*ROLLOUT_KEY, *SPAN_KEY, "agent", "is_bare_call", "redacted", "rollout_reason")
        ),
        rewards=chunk.rewarded.rewards,
        newest=newest_version(chunk.calls, admitted_reasons(settings.admit)),
        calls=chunk.calls.height,
        evaluations=count_evaluations(traces.evaluations, names).join(
            count_rewards(
                admitted_evaluations(traces, settings),
                traces.spans,
                traces.rollouts,
                names,
                of_calls_count=looks_at_calls(settings),
            ),
            on="rollout_id",
            how="left",
        ),
        ignored_self_rewards=chunk.rewarded.ignored_self_rewards,
        labels=chunk.rewarded.labels,
        unmatched=chunk.rewarded.unmatched,
        contested=frozenset(contested(traces.claims)["stem"]),
        ignored_values=chunk.ignored_values,
        ignored_claims=dict(traces.ignored.group_by("claim").len().sort("claim").iter_rows()),
        function_error=chunk.rewarded.function_error,
    )


def read_spilled(folder: Files, part: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The sound calls of a chunk, and TOKENS of its client-only calls. Raises DatasetError if they are not there."""
    calls, answers = _names(part)
    with folder.reading(calls) as calls_path, folder.reading(answers) as answers_path:
        return pl.read_ipc(calls_path), pl.read_ipc(answers_path)


def _names(part: int) -> tuple[str, str]:
    return f"calls-{part:05d}.arrow", f"answers-{part:05d}.arrow"

"""The files of a dataset: which rows each has, known before any token is read, and how one is written."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from trainspan_processing.assembly.rows import ROW_ORDER, CallLimits, RowCounts, make_rows
from trainspan_processing.assembly.shuffle import CHUNK, Shuffle
from trainspan_processing.assembly.spill import read_spilled
from trainspan_processing.credit.advantages import with_credit
from trainspan_processing.dataset.files import Files
from trainspan_processing.dataset.parquet import FileEntry, write_part
from trainspan_processing.read.source import Source
from trainspan_processing.read.tokens import chunk_number, token_batches
from trainspan_processing.reasons.reason_counts import REASON_COUNTS, count_reasons
from trainspan_processing.reasons.reason_examples import first_examples
from trainspan_processing.tables import SPAN_KEY, TOKENS, compact, empty

__all__ = ["PartPlan", "WritePart", "WrittenPart", "plan_parts"]

CALLS_PER_FILE: Final = 262_144


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One file: chunks of whole rollouts, each bounded by calls and by tokens."""

    number: int
    rollouts: pl.DataFrame
    """rollout, in_part, part, rollout_reward, `chunk` and `place` of its rollouts, in order."""
    advantages: pl.DataFrame
    """rollout, position, return, advantage and drop of their calls."""

    def chunks(self, source: Source, folder: Files) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
        """Yields the sound calls with their credit, in the order of datasets, and their TOKENS.

        `folder` has the spilled calls of each part. Raises DatasetError if they are not there.

        Calls and tokens are read in the order of the stores, once for the whole file: a chunk's rollouts can be anywhere in a
        store, and a read for each chunk would pass over all that lies between them.
        """
        chunks = self.rollouts[CHUNK].unique(maintain_order=True).to_list()
        with folder.temporary_folder() as calls_folder, folder.temporary_folder() as tokens_folder:
            is_small = len(chunks) < 2
            calls, tokens = Shuffle(None if is_small else calls_folder), Shuffle(None if is_small else tokens_folder)
            places = [self._divide(folder, part, calls, tokens) for part in self.rollouts["part"].unique().sort()]
            if places:
                stored = pl.concat(places)
                chunk_of = stored.select(*SPAN_KEY, CHUNK)
                for batch in token_batches(source, stored):
                    tokens.add(batch.join(chunk_of, on=SPAN_KEY))
                del places, stored, chunk_of
            for chunk in chunks:
                own = self.rollouts.filter(pl.col(CHUNK) == chunk).select("rollout")
                advantages = self.advantages.join(own, on="rollout", how="semi")
                credited = with_credit(pl.concat(calls.take(chunk)), advantages)
                yield (
                    credited.sort("place", "position").drop("place"),
                    pl.concat([empty(TOKENS), *tokens.take(chunk)]),
                )

    def _divide(self, folder: Files, part: int, calls: Shuffle, tokens: Shuffle) -> pl.DataFrame:
        """Adds the file's calls of a part, and TOKENS of the client-only ones; where the tokens of its calls are stored."""
        own = self.rollouts.filter(pl.col("part") == part).drop("part")
        spilled, answers = read_spilled(folder, part)
        found = spilled.join(own, on="in_part").drop("in_part")
        calls.add(found)
        places = compact(found.select(*SPAN_KEY, "store", "seq", "constrained", CHUNK))
        tokens.add(answers.join(places.select(*SPAN_KEY, CHUNK), on=SPAN_KEY))
        return places


def plan_parts(compared: pl.DataFrame, advantages: pl.DataFrame) -> Iterator[PartPlan]:
    """The files of a dataset with these rollouts and advantages (see Assembly); one empty file if there are none.

    A file ends with the chunk in which it reaches CALLS_PER_FILE sound calls. It may get fewer rows, since some calls are
    dropped for their tokens, so that the files can be written without each other.
    """
    ordered = compared.filter(pl.col("sound") > 0).sort(*ROW_ORDER)
    chunks = chunk_number(ordered["sound"], ordered["tokens"])
    numbered = ordered.select(
        *("rollout", "in_part", "part"),
        pl.col("reward").alias("rollout_reward"),
        chunks,
        _files_of(chunks, ordered["sound"]),
    ).with_row_index("place")
    if numbered.is_empty():
        yield PartPlan(0, numbered.drop("file"), advantages.clear())
        return
    for number, rollouts in enumerate(numbered.partition_by("file", maintain_order=True, include_key=False)):
        yield PartPlan(number, rollouts, advantages.join(rollouts.select("rollout"), on="rollout", how="semi"))


def _files_of(chunks: pl.Series, sound: pl.Series) -> pl.Series:
    """`file` (u32) of each rollout: whole chunks, until there are CALLS_PER_FILE calls."""
    calls = np.bincount(chunks.to_numpy(), weights=sound.to_numpy()) if len(chunks) else np.empty(0)
    files, file, held = np.zeros(len(calls), dtype=np.uint32), 0, 0.0
    for chunk, count in enumerate(calls.tolist()):
        files[chunk], held = file, held + count
        if held >= CALLS_PER_FILE:
            file, held = file + 1, 0.0
    return pl.Series("file", files[chunks.to_numpy()])


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A file, and all that is known of its rows."""

    file: FileEntry
    counts: RowCounts
    reason_counts: pl.DataFrame
    """REASON_COUNTS of its calls."""
    examples: pl.DataFrame
    """EXAMPLES of the reasons of its calls."""


@dataclass(frozen=True, slots=True)
class WritePart:
    """Reads the tokens of one file, and writes its rows chunk by chunk."""

    limits: CallLimits
    calls: Files
    """The spilled calls."""
    rows: Files
    """Folder of the file."""

    def __call__(self, source: Source, plan: PartPlan) -> WrittenPart:
        counts, reason_counts, examples = RowCounts(), [empty(REASON_COUNTS)], [first_examples()]

        def frames() -> Iterator[pl.DataFrame]:
            for rows, judged in make_rows(plan.chunks(source, self.calls), self.limits, counts):
                reason_counts.append(compact(count_reasons(judged)))
                examples[0] = first_examples(examples[0], judged)
                del judged
                yield rows
                del rows  # before the next chunk is made

        file = write_part(self.rows, plan.number, frames())
        return WrittenPart(file, counts, pl.concat(reason_counts), examples[0])

"""The files of a dataset: which rows each has, known before any token is read, and how one is written."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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
from trainspan_processing.read.tokens import chunk_number, token_batches, token_reads
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

        Tokens are read in stretches of the stores, each once, and a chunk is yielded once its last stretch is read: a chunk's
        rollouts can be anywhere in a store, and a read for each chunk would pass over all that lies between them.
        """
        with contextlib.ExitStack() as opened:

            def new_folder() -> Path:
                return opened.enter_context(folder.temporary_folder())

            calls, tokens = Shuffle(new_folder), Shuffle(new_folder)
            places = [self._divide(folder, part, calls, tokens) for part in self.rollouts["part"].unique().sort()]
            reads = list(token_reads(pl.concat(places))) if places else []
            ahead = _TokensAhead(source, sorted(reads, key=_first_chunk), tokens)
            del places, reads
            for chunk in self.rollouts[CHUNK].unique(maintain_order=True).to_list():
                ahead.complete(chunk)
                yield (
                    pl.concat(calls.pop(chunk)).sort("place", "position").drop("place"),
                    pl.concat([empty(TOKENS), *tokens.pop(chunk)]),
                )

    def _divide(self, folder: Files, part: int, calls: Shuffle, tokens: Shuffle) -> pl.DataFrame:
        """Adds the file's calls of a part, and TOKENS of the client-only ones; where the tokens of its calls are stored."""
        of_part = self.rollouts.filter(pl.col("part") == part).drop("part")
        spilled, answers = read_spilled(folder, part)
        credited = with_credit(spilled.join(of_part, on="in_part").drop("in_part"), self.advantages)
        calls.add(credited)
        if answers.height:
            tokens.add(answers.join(credited.select(*SPAN_KEY, CHUNK), on=SPAN_KEY))
        return credited.select("store", "seq", "constrained", CHUNK)


class _TokensAhead:
    """Reads the stretches of the stores that the chunks need, in the order in which chunks need them."""

    def __init__(self, source: Source, reads: list[pl.DataFrame], tokens: Shuffle) -> None:
        """`reads` are frames of `token_reads` with `chunk`."""
        self._source = source
        self._left = list(reversed(reads))
        self._tokens = tokens
        self._left_at: dict[int, int] = {}
        """Chunk → how many reads are left once it is complete."""
        for n_left, read in enumerate(self._left):
            for chunk in read[CHUNK].unique().to_list():
                self._left_at.setdefault(chunk, n_left)

    def complete(self, chunk: int) -> None:
        """Reads on until the shuffle has all tokens of `chunk`."""
        while len(self._left) > self._left_at.get(chunk, len(self._left)):
            read = self._left.pop()
            for batch in token_batches(self._source, read, ("seq", *TOKENS)):
                rows = read["seq"].search_sorted(batch["seq"])
                self._tokens.add(batch.drop("seq").with_columns(read[CHUNK].gather(rows)))


def _first_chunk(read: pl.DataFrame) -> int:
    return int(str(read[CHUNK].min()))


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
    files, file, n_calls = np.zeros(len(calls), dtype=np.uint32), 0, 0.0
    for chunk, count in enumerate(calls.tolist()):
        files[chunk], n_calls = file, n_calls + count
        if n_calls >= CALLS_PER_FILE:
            file, n_calls = file + 1, 0.0
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

"""Some of a rollout's rows by number, chosen by the collector: what is not shown is not read."""

from collections.abc import Sequence

import polars as pl

from trainspan_processing.read.source import Selection, Source

__all__ = ["part_of"]


def part_of(
    source: Source, name: str, selection: Selection, columns: Sequence[str], *, start: int, most: int, **more: object
) -> tuple[pl.DataFrame, int]:
    """At most `most` rows of the read `name` from number `start`, in the order of their start, and the number of all.

    The rows of several stores follow each other. `more` are further parameters of the read. Without rows the frame has no columns.
    """
    parts: list[pl.DataFrame] = []
    left, total = most, 0
    for store in range(len(source.stores)):
        skip = max(start - total, 0)
        frames = list(source.read(name, selection, columns, store=store, skip=skip, rows=max(left, 1), **more))
        rows = pl.concat(frames) if frames else pl.DataFrame()
        if rows.is_empty() and skip:  # it begins after the last row of this store, and only a row has their number
            frames = list(source.read(name, selection, columns[:1], store=store, rows=1, **more))
            first = pl.concat(frames) if frames else pl.DataFrame()
            total += int(first["n_selected"][0]) if first.height else 0
        elif rows.height:
            total += int(rows["n_selected"][0])
            parts.append(rows.drop("n_selected").head(left))
            left -= parts[-1].height
    return (pl.concat(parts) if parts else pl.DataFrame()), total

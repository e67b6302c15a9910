"""Rebuilds a published dataset from its manifest and the data that its run saw (recorded.py)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from trainspan_processing.assembly.build import BuildRequest, BuiltDataset, Pages, build_dataset
from trainspan_processing.assembly.recorded import recorded
from trainspan_processing.dataset.mirror import Mirror
from trainspan_processing.dataset.published import Published, open_published
from trainspan_processing.read.engine import Engine
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_processing.traces.trace_index import Clock
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import DatasetError

__all__ = ["Rebuilt", "rebuild"]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A rebuilt dataset."""

    built: BuiltDataset
    differences: list[str]
    """Differences from the original; empty if every file has the same bytes."""


def rebuild(
    original: Path,
    out: Path,
    stores: Sequence[str] | None,
    clock: Clock,
    pages: Pages | None = None,
    engine: Engine | None = None,
    mirror: Mirror | None = None,
) -> Rebuilt:
    """Rebuilds the dataset `original` in the folder `out` (see BuildRequest), from its own stores or from `stores` that hold its rollouts.

    Raises DatasetError if `out` is the original's own folder, or if an earlier dataset that it depends on is gone or
    changed.
    """
    published = open_published(original)
    if out.resolve() == published.path.resolve().parent:
        raise DatasetError(f"{original} is in {out}: choose another --out for the rebuild")
    record = published.manifest["settings"]
    known = {item.name for item in fields(DatasetSettings)}
    settings = DatasetSettings(**{key: value for key, value in record.items() if key in known}, out=str(out))
    chosen = tuple(stores or published.stores)
    request = BuildRequest(
        stores=chosen,
        out=out,
        settings=settings,
        run_id=record["run_id"],
        round=record["round"],
        since_round=record.get("since_round"),
        since_seq=record.get("since_seq"),
        number=published.manifest["round"],
        mirror=mirror,
        recorded=recorded(published, chosen),
    )
    built = build_dataset(request, clock, pages, engine)
    return Rebuilt(built, _differences(published, open_published(built.path)))


def _differences(original: Published, again: Published) -> list[str]:
    before, after = original.manifest, again.manifest
    old, new = ({file["name"]: file["sha256"] for file in manifest["files"]} for manifest in (before, after))
    if old == new:
        return []
    differences = [f"{before['rows']} rows, {after['rows']} in the rebuild"]
    for name, digest in before["functions"].items():
        if after["functions"].get(name) != digest:
            differences.append(f"{name} has changed")
    if before["trainspan"] != after["trainspan"]:
        differences.append(f"trainspan changed from {before['trainspan']} to {after['trainspan']}")
    if lost := original.seen().join(again.seen(), on=ROLLOUT_KEY, how="anti").height:
        differences.append(f"{lost} of its rollouts are not in the stores or were used by an earlier dataset")
    if before["rewards"] != after["rewards"]:
        differences.append("rewards differ: some arrived after the dataset was built or are not in the stores")
    return differences

"""Makes a published dataset again: from its own manifest, the same rollouts, and what earlier datasets had seen."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainspan_schemas.errors import DatasetError
from trainspan_schemas.settings import DatasetSettings

from .build import BuiltDataset, Request, build_dataset
from .fates import NO_ROLLOUT
from .ledger import ledger_path, read_ledger
from .published import Published, open_published
from .survey import Clock

__all__ = ["Rebuilt", "rebuild"]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A dataset that was made again."""

    built: BuiltDataset
    differences: list[str]
    """What is not as it was; empty where every file has the same bytes."""


def rebuild(original: Path, out: Path, stores: Sequence[str] | None, clock: Clock) -> Rebuilt:
    """Makes the dataset `original` again in the folder `out`, from its own stores or from `stores` that hold its rollouts.

    Raises DatasetError where `out` is the original's own folder, or an earlier dataset that it depends on is gone or changed.
    """
    published = open_published(original)
    if out.resolve() == published.path.resolve().parent:
        raise DatasetError(f"{original} lies in {out}: name another --out to make it again")
    recorded = published.manifest["settings"]
    known = {item.name for item in fields(DatasetSettings)}
    settings = DatasetSettings(**{key: value for key, value in recorded.items() if key in known}, out=str(out))
    seen = [rollout for rollout in published.seen()["rollout_id"].to_list() if not rollout.startswith(NO_ROLLOUT)]
    request = Request(
        stores=tuple(stores or published.stores),
        out=out,
        settings=settings,
        run_id=recorded["run_id"],
        round=recorded["round"],
        number=published.manifest["round"],
        rollout_ids=sorted(set(seen)),
        earlier=read_ledger(published.path.parent, only=_earlier(published)),
    )
    built = build_dataset(request, clock)
    return Rebuilt(built, _differences(published.manifest, built.manifest))


def _earlier(published: Published) -> list[Path]:
    """The folders of the datasets whose ledgers it was built with, unchanged."""
    folders = []
    for entry in published.manifest["earlier"]:
        folder = published.path.parent / entry["name"]
        ledger = ledger_path(folder)
        if not ledger.is_file() or hashlib.sha256(ledger.read_bytes()).hexdigest() != entry["ledger_sha256"]:
            raise DatasetError(f"{folder}, which {published.path} was built after, is gone or changed: put it back")
        folders.append(folder)
    return folders


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    old, new = ({file["name"]: file["sha256"] for file in manifest["files"]} for manifest in (before, after))
    if old == new:
        return []
    found = [f"rows: {before['rows']} became {after['rows']}"]
    if before["version"] != after["version"]:
        found.append(f"dataset version {before['version']} became {after['version']}, which has other columns")
    for name, digest in before["functions"].items():
        if after["functions"].get(name) != digest:
            found.append(f"{name} has changed")
    if before["trainspan"] != after["trainspan"]:
        found.append(f"trainspan {before['trainspan']} became {after['trainspan']}")
    if before["rewards"] != after["rewards"]:
        found.append("rewards differ: some came after the dataset was built")
    return found

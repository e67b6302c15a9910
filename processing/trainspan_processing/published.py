"""Datasets as they lie on disk: manifest, ledger and rows, read for inspection and export."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from trainspan_schemas.dataset import DATASET_VERSION, MANIFEST
from trainspan_schemas.errors import DatasetError, UsageError

from .frames import ROLLOUT_KEY, Schema
from .ledger import LEDGER, LEDGER_FILE

__all__ = ["SEEN", "Published", "open_published"]

SEEN: Final[Schema] = {name: kind for name, kind in LEDGER.items() if name != "parts"}
"""What inspection needs of the ledger: one row per rollout that the dataset saw."""


@dataclass(frozen=True, slots=True)
class Published:
    """One dataset folder."""

    path: Path
    manifest: dict[str, Any]

    @property
    def stores(self) -> list[str]:
        """The stores that it was built from."""
        return [item["store"] for item in self.manifest["inputs"]]

    def seen(self) -> pl.DataFrame:
        """SEEN, sorted by rollout. Raises DatasetError where the ledger is missing or malformed."""
        path = self.path / LEDGER_FILE
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            rows = [[line.get(name) for name in SEEN] for line in lines]
        except (OSError, ValueError, AttributeError) as error:
            raise DatasetError(f"{path} cannot be read ({error}): the dataset is damaged; build it again") from error
        return pl.DataFrame(rows, schema=SEEN, orient="row").sort(ROLLOUT_KEY)

    def rows(self, columns: Sequence[str | pl.Expr]) -> pl.DataFrame:
        """Columns of all rows, in their order; what is not asked for is not read.

        Raises DatasetError where a file is missing or damaged.
        """
        files = [self.path / file["name"] for file in self.manifest["files"]]
        try:
            return pl.concat([pl.scan_parquet(file).select(columns).collect() for file in files])
        except (OSError, pl.exceptions.PolarsError) as error:
            raise DatasetError(
                f"{self.path} cannot be read ({error}): the dataset is damaged; build it again"
            ) from error


def open_published(path: Path) -> Published:
    """The dataset at `path`, a folder such as `dataset/round=0003`. Raises UsageError where there is none."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        inside = sorted(folder.parent.name for folder in path.glob(f"round=*/{MANIFEST}"))
        hint = f"name one of its datasets, e.g. {path / inside[-1]}" if inside else "name a folder with a manifest.json"
        raise UsageError(f"no dataset at {path}: {hint}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / MANIFEST} cannot be read: {error}") from error
    if manifest.get("version") != DATASET_VERSION:
        raise UsageError(f"{path} has version {manifest.get('version')}, this trainspan reads {DATASET_VERSION}")
    return Published(path, manifest)

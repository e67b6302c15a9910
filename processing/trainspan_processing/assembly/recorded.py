"""The view of the run that built a dataset: its stores up to their watermarks, its clock, and the datasets before it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from trainspan_processing.dataset.ledger import DatasetLedger, Earlier, digest_of, ledger_path, read_ledger
from trainspan_processing.dataset.published import Published
from trainspan_processing.read.inventory import take_inventory
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.reasons.reason_counts import NO_ROLLOUT
from trainspan_processing.traces.trace_index import Clock
from trainspan_schemas.artifacts.dataset import dataset_dirs, round_dir_name, round_of
from trainspan_schemas.errors import DatasetError

__all__ = ["Recorded", "recorded"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A view of stores as the run that built a dataset saw them."""

    selection: Selection
    """The run's selection. In stores other than its own: the rollouts that it looked at, from its ledger, and the rollouts
    that earlier datasets had dropped."""
    earlier: DatasetLedger
    """The ledger of the datasets that existed."""
    watermarks: Mapping[int, int] | None
    """Store number → the last `seq` that the run saw; None in other stores, where sequence numbers differ."""
    as_of_ns: int | None
    """The run's time; None if the dataset does not record it."""

    def clock(self, clock: Clock) -> Clock:
        """A clock with the run's time if it is known, else `clock` itself."""
        as_of_ns = self.as_of_ns
        return clock if as_of_ns is None else Clock(lambda: as_of_ns, clock.sleep)

    def open(self, stores: Sequence[str], *, allow_behind: bool) -> Source:
        """The stores as the run saw them."""
        marks = self.watermarks
        return Source(stores, allow_behind, watermarks=dict(marks or {}), is_held=marks is not None)

    def rollouts_at_hand(self, source: Source) -> Selection:
        """The selection, limited to the ids of its unused rollouts."""
        inventory = take_inventory(source, self.selection).without(self.earlier.used.select("rollout_id", "attempt"))
        ids = inventory.since(self.selection).holdings["rollout_id"].unique().sort().to_list()
        return replace(self.selection, rollout_ids=ids)


def recorded(dataset: Published, stores: Sequence[str]) -> Recorded:
    """The view that the run that built `dataset` had, applied to its own stores or to others.

    Raises DatasetError if an earlier dataset that it depends on is gone or changed.
    """
    settings, as_of_ns = dataset.manifest["settings"], dataset.manifest.get("as_of_ns")
    earlier = _earlier(dataset)
    is_own = list(stores) == dataset.stores and as_of_ns is not None
    marks = {number: item["watermark"] for number, item in enumerate(dataset.manifest["inputs"])}
    ids = None if is_own else sorted({*_ids(dataset.seen()), *_ids(earlier.dropped)})
    since_round, since_seq = settings.get("since_round"), settings.get("since_seq")
    selection = Selection(settings["run_id"], settings["round"], ids, since_round=since_round, since_seq=since_seq)
    return Recorded(selection, earlier, marks if is_own else None, as_of_ns)


def _ids(ledger: pl.DataFrame) -> set[str]:
    return {name for name in ledger["rollout_id"].to_list() if not name.startswith(NO_ROLLOUT)}


def _earlier(dataset: Published) -> DatasetLedger:
    """The ledger of the datasets that it was built after. Raises DatasetError if one is gone or changed."""
    earlier = Earlier.of_record(dataset.manifest["earlier"])
    root = dataset.path.parent
    there = {round_of(folder.name): folder for folder in dataset_dirs(root)}
    numbers = (number for first, last in earlier.rounds for number in range(first, last + 1))
    folders = [
        there.get(number) or root / round_dir_name(number) for number in numbers
    ]  # of some, only the ledger is here
    if missing := [folder for folder in folders if not ledger_path(folder).is_file()]:
        raise DatasetError(f"{missing[0]} is missing, but {dataset.path} was built after it: restore it")
    ledger = read_ledger(root, only=folders)
    if digest_of(ledger.files) != earlier.ledgers_sha256:
        many = "1 dataset" if len(earlier) == 1 else f"{len(earlier)} datasets"
        raise DatasetError(
            f"{dataset.path} was built after {many} in {root}, and a ledger there has changed: restore it"
        )
    return ledger

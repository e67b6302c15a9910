"""Updates between versions whose numbers have gaps."""

from pathlib import Path

from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry
from trainspan_training.checkpoints.lineage import Lineage


def lineage_of(folder: Path, *parents: tuple[int, int | None], start: str = "/models/base") -> Lineage:
    """The lineage of a ledger with these (version, parent); None: the start model."""
    ledger = CheckpointLedger(folder)
    for version, parent in parents:
        name = start if parent is None else f"policy-{parent:06d}"
        ledger.append(LedgerEntry("trained", f"dataset {version}", f"policy-{version:06d}", parent=name))
    return Lineage.of(CheckpointLedger(folder))


def test_refused_versions_are_no_updates_between_those_before_and_after(tmp_path: Path) -> None:
    lineage = lineage_of(tmp_path, (1, None), (2, 1), (3, 2), (4, 2), (5, 4))
    assert [lineage.distance(version, 5) for version in (5, 4, 2, 1, 0)] == [0, 1, 2, 3, 4]
    assert lineage.path(2, 5) == [4, 5]


def test_a_withdrawn_version_is_as_far_as_the_updates_on_both_sides(tmp_path: Path) -> None:
    lineage = lineage_of(tmp_path, (1, None), (2, 1), (3, 2), (4, 1), (5, 4))
    assert lineage.path(3, 1) == [2, 3], "in service is an earlier one"
    assert lineage.path(3, 5) == lineage.path(5, 3) == [2, 3, 4, 5]
    assert lineage.distance(3, 5) == 4


def test_the_start_model_has_the_number_before_the_first_version(tmp_path: Path) -> None:
    lineage = lineage_of(tmp_path, (6, None), (7, None), (8, 7))
    assert lineage.path(5, 8) == [7, 8]


def test_a_start_model_that_is_a_checkpoint_is_no_update(tmp_path: Path) -> None:
    ledger = CheckpointLedger(tmp_path)
    ledger.append(LedgerEntry("trained", None, "policy-000000", parent="/models/base"))  # rolled forward after a kill
    lineage = lineage_of(tmp_path, (1, 0), (2, 1))
    assert lineage.path(0, 2) == [1, 2]


def test_between_unrelated_versions_the_numbers_are_all_that_is_known(tmp_path: Path) -> None:
    lineage = lineage_of(tmp_path, (1, None), (2, 1))
    assert (lineage.path(9, 2), lineage.distance(9, 2), lineage.path(9, 9)) == (None, 7, [])
    assert Lineage({1: 0, 9: 7}).path(1, 9) is None

"""Checkpoints that a trainer publishes under a URL, copied from a folder and from a server of plain files."""

import filecmp
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.policy_server.files import breaking_connection, file_server
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, hash_weights
from trainspan_schemas.artifacts.checkpoint_files import CheckpointFiles
from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.policy_server import Offer
from trainspan_serving.checkpoints.copies import CopiesFolder
from trainspan_serving.checkpoints.source import CheckpointSource, CopyFailedError
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry
from trainspan_training.checkpoints.published import announce
from trainspan_training.checkpoints.swap_request import PolicyAddress

NAME = "policy-000003"
SIZE = 3_000_000


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """A folder of checkpoints, the folder in which they are published, and the URL that serves it."""
    root = tmp_path_factory.mktemp("trainer")
    url = f"file://{root}/published"
    for policy in (None, "writer"):
        folder = root / "checkpoints" / (policy or "") / NAME
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(os.urandom(SIZE))
        (folder / "empty").touch()
        CheckpointMeta("full", 3, None, "base", None, hash_weights(folder)).write(folder)
        CheckpointLedger(folder.parent).append(LedgerEntry("published", None, NAME))
        announce(folder.parent, PolicyAddress("http://127.0.0.1:9", policy, url))
    with file_server(root / "published") as served:
        yield root / "checkpoints", root / "published", served


def pull(url: str, into: Path) -> None:
    CopiesFolder(into, CheckpointSource(url)).pull(NAME, None)


def assert_equal(original: Path, copy: Path) -> None:
    names = sorted(path.name for path in original.iterdir())
    assert sorted(path.name for path in copy.iterdir()) == names
    assert filecmp.cmpfiles(original, copy, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("policy", [None, "writer"])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_the_checkpoint_in_service_is_copied_whole(
    trainer: tuple[Path, Path, str], tmp_path: Path, policy: str | None, scheme: str
) -> None:
    checkpoints, published, url = trainer
    original, own = checkpoints / (policy or "") / NAME, tmp_path / "own" / (policy or "")
    source = CheckpointSource(url if scheme == "http" else f"file://{published}")
    assert source.accepted(policy) == Offer(NAME, 3, hash_weights(original))
    copies = CopiesFolder(tmp_path / "own", source)
    copies.pull(NAME, policy)
    assert_equal(original, own / NAME)
    copies.pull(NAME, policy)
    copies.pull("policy-000009", policy)
    assert {path.name for path in own.iterdir()} - {".pull-lock"} == {NAME}, "nothing else was there"


def test_a_broken_connection_costs_only_the_file_that_did_not_arrive(
    trainer: tuple[Path, Path, str], tmp_path: Path
) -> None:
    checkpoints, _, url = trainer
    # The list and `empty` come first; then two connections break within the weights.
    with breaking_connection(url, [1_000_000, 1_500_000]) as (relay, passed):
        pull(relay, tmp_path)
    assert_equal(checkpoints / NAME, tmp_path / NAME)
    assert SIZE < sum(passed) < 2_500_000 + SIZE + 300_000


def test_a_copy_that_was_killed_is_continued_and_wrong_bytes_are_never_served(
    trainer: tuple[Path, Path, str], tmp_path: Path
) -> None:
    checkpoints, published, url = trainer
    weights = (checkpoints / NAME / "model.safetensors").read_bytes()
    partial = tmp_path / f".pull-{NAME}"
    partial.mkdir()
    (tmp_path / ".pull-lock").touch()
    (partial / "model.safetensors").write_bytes(weights)
    (partial / ".trainspan.json").write_text("{")
    (partial / "of an earlier list").touch()
    with breaking_connection(url, []) as (relay, passed):
        pull(relay, tmp_path)
    assert_equal(checkpoints / NAME, tmp_path / NAME)
    assert sum(passed) < 50_000
    damaged = published / NAME / "model.safetensors"
    damaged.write_bytes(bytes(SIZE))
    try:
        with pytest.raises(CopyFailedError, match=rf"{NAME}/model.safetensors has sha256 .* was published"):
            pull(url, tmp_path / "other")
    finally:
        damaged.write_bytes(weights)
    assert not (tmp_path / "other" / NAME).exists()


def test_a_request_cannot_name_a_place_to_copy_from(trainer: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, _, url = trainer
    with breaking_connection(url, []) as (relay, passed), breaking_connection(url, []) as (elsewhere, asked):
        copies = CopiesFolder(tmp_path, CheckpointSource(relay))
        for name in (f"{elsewhere}/{NAME}", f"//{elsewhere}/{NAME}", f"../{NAME}", f"writer/{NAME}", f"{NAME}?x", ""):
            copies.pull(name, None)
        assert (passed, asked) == ([], [])
        offer, _ = Offer.parse(json.dumps({"checkpoint": NAME, "version": 3, "checkpoints_url": elsewhere}).encode())
        copies.pull(offer.checkpoint, None)
        assert (bool(passed), asked) == (True, [])


def test_without_an_answer_the_error_names_the_machine(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"http://127\.0\.0\.1:9.*the request failed"):
        pull("http://127.0.0.1:9", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": "../elsewhere"},
        {"files": {"../../.bashrc": {"sha256": "0" * 64, "size_bytes": 1}}},
        {"files": {"a": {"sha256": "0" * 64, "size_bytes": -1}}},
        {"files": {"a": {"sha256": "zz", "size_bytes": 1}}},
        {"files": ["a"]},
    ],
)
def test_a_list_that_leads_elsewhere_is_refused(change: dict[str, object]) -> None:
    good = {"checkpoint": NAME, "files": {"a": {"sha256": "0" * 64, "size_bytes": 1}}}
    assert CheckpointFiles.parse(json.dumps(good).encode()).size_bytes == 1
    with pytest.raises(CheckpointError, match="the list of a checkpoint's files"):
        CheckpointFiles.parse(json.dumps({**good, **change}).encode())

"""Checkpoints copied from the trainer's machine, from a real `trainspan weights`."""

import filecmp
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.policy_server.weights import breaking_connection, weights_server
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, hash_weights
from trainspan_schemas.artifacts.checkpoint_files import CheckpointFiles
from trainspan_schemas.errors import CheckpointError
from trainspan_serving.checkpoints.copies import CopiesFolder
from trainspan_serving.checkpoints.pull import AcceptedCheckpoint, CheckpointSource
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry

TOKEN = "the token of swaps"
NAME = "policy-000003"
SIZE = 3_000_000


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder of checkpoints, and the URL that serves it."""
    root = tmp_path_factory.mktemp("trainer")
    for policy in ("", "writer"):
        folder = root / "checkpoints" / policy / NAME
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(os.urandom(SIZE))
        (folder / "empty").touch()
        CheckpointMeta("full", 3, None, "base", None, hash_weights(folder)).write(folder)
        CheckpointLedger(folder.parent).append(LedgerEntry("published", None, NAME))
    (root / "checkpoints" / NAME / "link").symlink_to("/etc/passwd")
    (root / "token").write_text(TOKEN)
    (root / "token").chmod(0o600)
    with weights_server(root / "checkpoints", root) as url:
        yield root / "checkpoints", url


def pull(url: str, into: Path) -> None:
    CopiesFolder(into, CheckpointSource(url, TOKEN, patience_s=2.0)).pull(NAME, None)


def assert_equal(original: Path, copy: Path) -> None:
    names = sorted(path.name for path in original.iterdir() if not path.is_symlink())
    assert sorted(path.name for path in copy.iterdir()) == names
    assert filecmp.cmpfiles(original, copy, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("policy", [None, "writer"])
def test_the_checkpoint_in_service_is_copied_whole(
    trainer: tuple[Path, str], tmp_path: Path, policy: str | None
) -> None:
    checkpoints, url = trainer
    original, own = checkpoints / (policy or "") / NAME, tmp_path / "own" / (policy or "")
    source = CheckpointSource(url, TOKEN)
    assert source.latest(policy) == AcceptedCheckpoint(NAME, 3, hash_weights(original))
    copies = CopiesFolder(tmp_path / "own", source)
    copies.pull(NAME, policy)
    assert_equal(original, own / NAME)
    copies.pull(NAME, policy)
    copies.pull("policy-000009", policy)
    assert {path.name for path in own.iterdir()} - {".pull-lock"} == {".pulled", NAME}, "nothing else was there"


def test_a_broken_connection_costs_only_the_bytes_that_did_not_arrive(
    trainer: tuple[Path, str], tmp_path: Path
) -> None:
    checkpoints, url = trainer
    # The first connection is for the list; those of the large file break twice.
    with breaking_connection(url, [10**9, 10**9, 1_000_000, 1_500_000]) as (relay, passed):
        pull(relay, tmp_path)
    assert_equal(checkpoints / NAME, tmp_path / NAME)
    assert SIZE < sum(passed) < SIZE + 200_000, "each byte of the file once, and headers"


def test_a_copy_that_was_killed_is_continued_and_wrong_bytes_are_noticed(
    trainer: tuple[Path, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, url = trainer
    partial = tmp_path / f".pull-{NAME}"
    partial.mkdir()
    content = (checkpoints / NAME / "model.safetensors").read_bytes()
    (partial / "model.safetensors").write_bytes(content[: SIZE // 2])
    (partial / "of an earlier list").touch()
    with breaking_connection(url, []) as (relay, passed):
        pull(relay, tmp_path)
    assert_equal(checkpoints / NAME, tmp_path / NAME)
    assert sum(passed) < SIZE // 2 + 200_000
    other = tmp_path / "other" / f".pull-{NAME}"
    other.mkdir(parents=True)
    (other / "model.safetensors").write_bytes(bytes(SIZE // 2))
    pull(url, tmp_path / "other")
    assert_equal(checkpoints / NAME, tmp_path / "other" / NAME)
    assert "copied file differs from its hash file=model.safetensors" in caplog.text


def test_only_the_holder_of_the_token_gets_a_byte_and_only_of_listed_files(trainer: tuple[Path, str]) -> None:
    _, url = trainer
    with pytest.raises(CheckpointError, match=r"answers 401: .*this needs the token"):
        CheckpointSource(url, "another token").latest(None)
    for path in ("/files/" + "0" * 64, "/files/..%2f..%2fetc%2fpasswd", "/checkpoints/policy-000009", "/"):
        request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {TOKEN}"})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(request, timeout=10)
    for query in ("..%2fcheckpoints", "%2fetc", ""):
        request = urllib.request.Request(f"{url}/latest?policy={query}", headers={"Authorization": f"Bearer {TOKEN}"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request, timeout=10)


def test_without_an_answer_the_error_names_the_machine(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no answer from http://127\.0\.0\.1:9: .*refused"):
        pull("http://127.0.0.1:9", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": "../elsewhere"},
        {"files": {"../../.bashrc": {"sha256": "0" * 64, "size_bytes": 1}}},
        {"files": {"a": {"sha256": "0" * 64, "size_bytes": -1}}},
        {"files": {"a": {"sha256": "zz", "size_bytes": 1}}},
        {"files": ["a"]},
        {"version": "3"},
    ],
)
def test_a_list_that_leads_elsewhere_is_refused(change: dict[str, object]) -> None:
    good = {"checkpoint": NAME, "version": 3, "files": {"a": {"sha256": "0" * 64, "size_bytes": 1}}}
    assert CheckpointFiles.parse(json.dumps(good).encode()).size_bytes == 1
    with pytest.raises(CheckpointError, match="the list of a checkpoint's files"):
        CheckpointFiles.parse(json.dumps({**good, **change}).encode())

"""Checkpoints under a URL: whole or not there, with what was accepted last, and no older ones than the folder has."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.training.support.swap_server import policy_server
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, hash_weights
from trainspan_schemas.artifacts.checkpoint_files import CheckpointFiles
from trainspan_schemas.errors import StorageError
from trainspan_schemas.files.objects import Objects
from trainspan_schemas.policy_server import Offer
from trainspan_training.checkpoints.ledger import CheckpointLedger, Event, LedgerEntry
from trainspan_training.checkpoints.published import announce, publish_files, remove_old, swap_in, tolerated
from trainspan_training.checkpoints.swap_request import PolicyAddress

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def there() -> Objects:
    return Objects(f"memory://{os.urandom(6).hex()}")


def address_of(there: Objects, policy: str | None = None) -> PolicyAddress:
    return PolicyAddress("http://127.0.0.1:9", policy, there.url)


def write(root: Path, version: int) -> Path:
    folder = root / f"policy-{version:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(os.urandom(1000))
    (folder / "tokenizer.json").write_text("{}")
    CheckpointMeta("full", version, None, "base", None, hash_weights(folder)).write(folder)
    return folder


def note(root: Path, event: Event, folder: Path) -> None:
    CheckpointLedger(root).append(LedgerEntry(event, None, folder.name))


def test_the_last_accepted_checkpoint_is_announced_not_the_last_written_one(tmp_path: Path, there: Objects) -> None:
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    announce(tmp_path, address_of(there))
    assert there.names() == [], "no canary has seen one yet"
    for event, folder, accepted in (
        ("published", first, first),
        ("published", second, second),
        ("withdrawn", second, first),
    ):
        note(tmp_path, event, folder)
        announce(tmp_path, address_of(there))
        assert Offer.parse(there.read(["accepted.json"])["accepted.json"])[0] == Offer.of(accepted)
    assert there.under(first.name).read(["tokenizer.json"]) == {"tokenizer.json": b"{}"}
    announce(tmp_path / "of a new run", address_of(there))
    assert "accepted.json" not in there.names()


def test_each_policy_has_a_folder_and_an_address_without_servers_publishes_nothing(
    tmp_path: Path, there: Objects
) -> None:
    folder = write(tmp_path, 1)
    publish_files(folder, PolicyAddress("none", None, there.url))
    publish_files(folder, PolicyAddress("http://127.0.0.1:9", "writer"))
    assert there.names() == []
    publish_files(folder, address_of(there, "writer"))
    assert sorted(there.under("writer").names()) == [folder.name, f"{folder.name}.json"]


def test_the_list_comes_last_and_that_of_an_earlier_run_goes_first(
    tmp_path: Path, there: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, 1)
    publish_files(folder, address_of(there))
    list_ = f"{folder.name}.json"
    listed = CheckpointFiles.parse(there.read([list_])[list_])
    assert listed.files.keys() == {"model.safetensors", "tokenizer.json", "trainspan.json"}
    write(tmp_path, 1)

    def fail(*_: Any) -> None:
        raise StorageError("cut off")

    with monkeypatch.context() as outage:
        outage.setattr(Objects, "upload", fail)
        with pytest.raises(StorageError, match="cut off"):
            publish_files(folder, address_of(there))
        assert list_ not in there.names()
    publish_files(folder, address_of(there))
    again = CheckpointFiles.parse(there.read([list_])[list_])
    assert again.files["model.safetensors"].sha256 == hash_weights(folder) != listed.files["model.safetensors"].sha256


def test_weights_are_not_hashed_if_the_trainer_has_stored_their_hashes(tmp_path: Path, there: Objects) -> None:
    folder = write(tmp_path, 1)
    stored = json.loads((folder / "trainspan.json").read_text()) | {"weights_files": {"model.safetensors": "ab" * 32}}
    (folder / "trainspan.json").write_text(json.dumps(stored))
    publish_files(folder, address_of(there))
    listed = CheckpointFiles.parse(there.read([f"{folder.name}.json"])[f"{folder.name}.json"])
    assert listed.files["model.safetensors"].sha256 == "ab" * 32
    assert listed.files["tokenizer.json"].sha256 == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_only_this_folders_own_checkpoints_are_removed_once_they_are_gone(tmp_path: Path, there: Objects) -> None:
    folders = [write(tmp_path, version) for version in (1, 2)]
    for folder in folders:
        publish_files(folder, address_of(there))
        note(tmp_path, "published", folder)
    there.put("policy-000009.json", b"another run's")
    shutil.rmtree(folders[0])
    remove_old(tmp_path, address_of(there))
    assert sorted(there.names()) == ["policy-000002", "policy-000002.json", "policy-000009.json"]


def test_what_cannot_be_published_is_not_swapped_in_and_ends_no_run(
    tmp_path: Path, there: Objects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
    with policy_server((200, {"version": 1})) as server:
        address = PolicyAddress(server.url, None, there.url)
        swap = swap_in(write(tmp_path, 1), address, retry_for_s=1, was_there=True)
        assert (swap.outcome, server.asked) == ("failed", [])
    assert "the request failed" in str(swap.error)
    note(tmp_path, "published", tmp_path / "policy-000001")
    with tolerated():
        announce(tmp_path, address)
    assert "the checkpoints' URL is not up to date" in caplog.text

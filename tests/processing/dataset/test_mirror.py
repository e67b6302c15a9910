"""Datasets that are read from a URL: verified, kept on this machine within bounds, and refused by name."""

import hashlib
import json
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.processing.support.remote import publish, publish_folder
from tests.support.dataset_files import LoggedCall, write_dataset
from trainspan_processing.dataset import mirror as mirrors
from trainspan_processing.dataset.mirror import Mirror, local_dataset
from trainspan_processing.dataset.remote import Pointer
from trainspan_schemas.artifacts.dataset import MANIFEST, dataset_dirs
from trainspan_schemas.errors import DatasetError, StorageError, UsageError
from trainspan_schemas.files.objects import Objects, check_url
from trainspan_training.checkpoints.ledger import CheckpointLedger
from trainspan_training.data.dataset import read_calls
from trainspan_training.dataset_queue import follow


def test_a_corrupted_object_is_refused_by_name_and_whole_files_are_not_read_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(url, tmp_path / "round-0000", b"one", b"two", b"three")
    folder = Mirror.of(url).remote.pointers()["round-0000"].folder
    Objects(url).under(folder).put("part-00001.parquet", b"2wo")
    with pytest.raises(StorageError, match=rf"{folder}/part-00001.parquet has sha256 .* was published"):
        local_dataset(f"{url}/round-0000")
    assert dataset_dirs(tmp_path / "home" / "remote") == []
    Objects(url).under(folder).put("part-00001.parquet", b"two")
    read: list[str] = []
    download = Objects.download
    monkeypatch.setattr(Objects, "download", lambda self, name, *rest: (read.append(name), download(self, name, *rest)))
    fetched = local_dataset(f"{url}/round-0000")
    assert read == ["part-00001.parquet", "part-00002.parquet"]
    assert [(fetched / f"part-0000{n}.parquet").read_bytes() for n in range(3)] == [b"one", b"two", b"three"]
    (fetched / "part-00002.parquet").write_bytes(b"damaged here")
    assert (local_dataset(f"{url}/round-0000") / "part-00002.parquet").read_bytes() == b"three"


def test_a_dataset_that_was_made_again_is_read_again(url: str, tmp_path: Path) -> None:
    publish(url, tmp_path / "round-0000", b"old")
    local_dataset(f"{url}/round-0000")
    for name in Objects(url).names():
        Objects(url).remove(name)
    Mirror.of(url).refresh()
    assert dataset_dirs(Mirror.of(url).known) == []
    publish(url, tmp_path / "round-0000", b"new")
    assert (local_dataset(f"{url}/round-0000") / "part-00000.parquet").read_bytes() == b"new"


def test_the_rows_of_the_last_datasets_stay_on_this_machine(url: str, tmp_path: Path) -> None:
    for number in range(mirrors.KEPT + 2):
        publish(url, tmp_path / f"round-{number:04d}", b"rows")
        local_dataset(f"{url}/round-{number:04d}")
    kept = local_dataset(f"{url}/round-0002").parent
    local_dataset(f"{url}/round-0000")
    assert [folder.name for folder in dataset_dirs(kept)] == ["round-0000", "round-0002", "round-0004", "round-0005"]
    assert len(dataset_dirs(Mirror.of(url).known)) == mirrors.KEPT + 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("round-0000.json", b"{}", "unknown version"),
        ("round-0000.json", b'{"version": 1, "folder": "../../etc"}', "folder '../../etc'"),
        ("round-0000.json", b'{"version": 1, "folder": "round-0001.0123456789abcdef"}', "folder 'round-0001"),
    ],
)
def test_a_malformed_pointer_is_refused_by_name(url: str, name: str, content: bytes, message: str) -> None:
    Objects(url).put(name, content)
    with pytest.raises(DatasetError, match=message):
        local_dataset(f"{url}/round-0000")


def test_a_manifest_cannot_name_files_elsewhere(url: str) -> None:
    manifest = json.dumps({"version": 3, "files": [{"name": "../../x.parquet", "sha256": "0"}]}).encode()
    folder = "round-0000.0123456789abcdef"
    Objects(url).under(f"{folder}.about").put(MANIFEST, manifest)
    pointer = Pointer(folder, hashlib.sha256(manifest).hexdigest(), "0" * 64)
    Objects(url).put("round-0000.json", pointer.to_json())
    with pytest.raises(DatasetError, match=r"names the file '../../x.parquet'"):
        local_dataset(f"{url}/round-0000")
    Objects(url).under(f"{folder}.about").put(MANIFEST, manifest + b" ")
    Mirror.of(url).known.joinpath("round-0000.about", "published.json").unlink()
    with pytest.raises(DatasetError, match=r"manifest.json is missing or changed"):
        local_dataset(f"{url}/round-0000")


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:s3cret@bucket/prefix",
        "s3://s3cret@bucket/prefix",
        "abfs://user:s3cret@account/prefix",
        "https://s3cret@host/prefix",
        "https://bucket/prefix?X-Amz-Signature=s3cret",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError, match="has credentials or a query in it") as caught:
        check_url(url)
    assert "s3cret" not in str(caught.value)


def test_messages_do_not_repeat_passwords_of_addresses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no answer from http://user:s3cret@proxy:3128/bucket")

    monkeypatch.setattr(MemoryFileSystem, "ls", refuse)
    with pytest.raises(StorageError, match=r"no answer from http://…@proxy:3128/bucket") as caught:
        Objects(url).names()
    assert "s3cret" not in str(caught.value)


def test_a_url_is_checked(url: str) -> None:
    assert (
        check_url("abfs://container@account.dfs.core.windows.net/x/")
        == "abfs://container@account.dfs.core.windows.net/x"
    )
    for wrong in ("s3://", "simplecache::s3://bucket/x"):
        with pytest.raises(UsageError, match="no URL of a folder"):
            check_url(wrong)
    with pytest.raises(UsageError, match="name one of its datasets"):
        local_dataset(url)
    with pytest.raises(UsageError, match=r"there is no memory://.*/round-0007.json"):
        local_dataset(f"{url}/round-0007")
    with pytest.raises(UsageError, match="Protocol not known"):
        Mirror.of("nonsense://bucket/x").refresh()


def test_a_trainer_that_follows_a_url_sees_new_datasets_and_gets_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("trainspan_training.dataset_queue.REFRESH_S", 0.0)
    mirror = Mirror.of(f"file://{tmp_path}/bucket")
    mirror.refresh()
    waited: list[None] = []

    def idle() -> None:
        if not waited:
            call = LoggedCall("a", [1, 2], [3], [-0.5], 1.0)
            local = write_dataset(tmp_path / "local", [call], round_=3)
            publish_folder(mirror, local)
        waited.append(None)

    found = next(follow(mirror.known, CheckpointLedger(tmp_path / "ledger.jsonl"), idle, mirror))
    assert found.path == local_dataset(f"{mirror.url}/round-0003")
    assert len(read_calls(found)[0]) == 1


def test_a_trainer_that_follows_a_url_tries_again_if_rows_cannot_be_fetched_or_the_store_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    for name in ("REFRESH_S", "RETRY_S"):
        monkeypatch.setattr(f"trainspan_training.dataset_queue.{name}", 0.0)
    mirror, bucket = Mirror.of(f"file://{tmp_path}/bucket"), tmp_path / "bucket"
    publish_folder(mirror, write_dataset(tmp_path / "local", [LoggedCall("a", [1, 2], [3], [-0.5], 1.0)], round_=3))
    (part,) = bucket.glob("round-0003.*/*.parquet")
    content, pointer = part.read_bytes(), bucket / "round-0003.json"
    part.write_bytes(b"not yet")
    text, waited = pointer.read_text(), [0]

    def idle() -> None:
        waited[0] += 1
        pointer.write_text("{" if waited[0] == 1 else text)
        if waited[0] == 3:
            part.write_bytes(content)

    found = next(follow(mirror.known, CheckpointLedger(tmp_path / "ledger.jsonl"), idle, mirror))
    assert (len(read_calls(found)[0]), waited) == (1, [3])
    said = [record.getMessage() for record in caplog.records]
    assert sum("part-0000.parquet has sha256" in line for line in said) == 3
    assert sum(line.startswith("no new datasets are seen until the store answers: file://") for line in said) == 1

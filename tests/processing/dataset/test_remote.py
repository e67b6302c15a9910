"""Datasets that are published under a URL, on fsspec's filesystem in memory: whole or not at all, whatever is killed."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.processing.conftest import Bench
from tests.processing.support.remote import publish
from tests.processing.support.traces import chain
from trainspan_processing.assembly.build import BuildRequest, BuiltDataset, build_dataset
from trainspan_processing.assembly.rebuild import rebuild
from trainspan_processing.dataset import remote, scratch
from trainspan_processing.dataset.files import RemoteFiles
from trainspan_processing.dataset.mirror import Mirror, known_dataset, local_dataset
from trainspan_processing.dataset.published import open_published
from trainspan_processing.dataset.scratch import remote_scratch
from trainspan_processing.explain.explain import explain_rollout
from trainspan_processing.explain.inquiry import Question
from trainspan_processing.read.engine import OneProcess
from trainspan_schemas.artifacts.dataset import LEDGER_FILE, MANIFEST, about_dir
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import DatasetError, StorageError
from trainspan_schemas.files.objects import Objects


class _Spread(OneProcess):
    """Works here, and says that other machines do."""

    is_spread = True


def _build(bench: Bench, url: str, round_: int | None = None, engine: OneProcess | None = None) -> BuiltDataset:
    mirror = Mirror.of(url)
    store, settings = str(bench.collectors[0].store), dataclasses.replace(DatasetSettings())
    request = BuildRequest([store], mirror.known, settings, bench.run_id, round_, mirror=mirror)
    return build_dataset(request, bench.clock, {"quality.html": lambda _: "page"}, engine)


def _pair(bench: Bench, names: str, **more: Any) -> None:
    bench.send(*(chain(bench.rollout(name, **more), 2).reward(float(name == names[0])) for name in names))


def _contents(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found | {LEDGER_FILE: (about_dir(folder) / LEDGER_FILE).read_bytes()}


@pytest.mark.parametrize("engine", [OneProcess(), _Spread()], ids=["here", "spread"])
def test_the_bytes_under_a_url_are_those_of_a_folder(bench: Bench, url: str, engine: OneProcess) -> None:
    _pair(bench, "ab")
    there, here = _build(bench, url, engine=engine), bench.build()
    assert there.place == f"{url}/round-0000"
    assert {**there.manifest, "as_of_ns": 0} == {**here.manifest, "as_of_ns": 0}
    assert _contents(local_dataset(there.place)) == _contents(here.path)
    folder = Mirror.of(url).remote.pointers()["round-0000"].folder
    assert sorted(Objects(url).names()) == [folder, f"{folder}.about", "round-0000.json"]
    assert Mirror.of(url).rows_url(there.path) == f"{url}/{folder}"
    assert url not in json.dumps(there.manifest)


def test_later_datasets_and_rebuilds_know_the_earlier_ones_on_any_machine(
    bench: Bench, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pair(bench, "ab")
    _build(bench, url)
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "another-machine"))
    _pair(bench, "cd")
    second = _build(bench, url)
    assert (second.place, second.manifest["rollouts"]) == (f"{url}/round-0001", 2)
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "a-third"))
    _, known = known_dataset(second.place, with_earlier=True)
    assert rebuild(known, tmp_path / "again", None, bench.clock).differences == []
    dataset = open_published(local_dataset(second.place, with_earlier=True))
    account = explain_rollout(Question(dataset.stores, "newest", DatasetSettings(), dataset=dataset), bench.clock)
    assert account.rollout_id in {f"{bench.run_id}-c", f"{bench.run_id}-d"}


def test_a_round_that_was_built_is_left_as_it_is(bench: Bench, url: str) -> None:
    _pair(bench, "ab", round=4)
    first = _build(bench, url, 4)
    again = _build(bench, url, 4)
    assert (again.was_there, again.sha256, again.place) == (True, first.sha256, f"{url}/round-0004")


def test_a_failed_command_leaves_the_earlier_datasets_and_nothing_else(bench: Bench, url: str) -> None:
    _pair(bench, "ab")
    _build(bench, url)
    before = Objects(url).names()
    with pytest.raises(DatasetError, match="no call in run"):
        _build(bench, url)
    assert Objects(url).names() == before


def _begun(url: str, days_ago: float) -> str:
    """The folder of a build with rows, which no process goes on with."""
    folder = f"round-0001.{int(time.time() - days_ago * 86_400):08x}{os.urandom(4).hex()}"
    objects = Objects(url)
    objects.under(folder).put("part-00000.parquet", b"half")
    objects.under(f"{folder}.calls").put("calls-00000.arrow", b"half")
    return folder


def test_what_a_killed_command_left_a_week_ago_is_removed_by_the_next_one(url: str, tmp_path: Path) -> None:
    publish(url, tmp_path / "round-0000", b"rows")
    killed, running = _begun(url, 8), _begun(url, 6)
    assert (local_dataset(f"{url}/round-0000") / "part-00000.parquet").read_bytes() == b"rows"
    publish(url, tmp_path / "round-0001", b"more rows")
    names = Objects(url).names()
    assert not [name for name in names if name.startswith(killed)]
    assert [name for name in names if name.startswith(running)] == [running, f"{running}.calls"]
    assert (local_dataset(f"{url}/round-0001") / "part-00000.parquet").read_bytes() == b"more rows"


def test_a_command_that_was_killed_after_it_published_is_only_tidied_up(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as long_ago:
        long_ago.setattr(remote, "new_folder", lambda name: f"{name}.00000001{os.urandom(4).hex()}")
        long_ago.setattr(scratch, "new_folder", remote.new_folder)
        publish(url, tmp_path / "round-0001", b"rows")
    folder = Mirror.of(url).remote.pointers()["round-0001"].folder
    assert ".00000001" in folder
    Objects(url).under(f"{folder}.calls").put("calls-00000.arrow", b"half")
    Mirror.of(url).remote.clear()
    assert sorted(Objects(url).names()) == [folder, f"{folder}.about", "round-0001.json"]
    assert (local_dataset(f"{url}/round-0001") / "part-00000.parquet").read_bytes() == b"rows"


def test_a_store_that_cannot_be_written_ends_a_build_before_its_rows_are_made(
    bench: Bench, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read only")

    def unexpected(*_: object) -> None:
        raise AssertionError("rows were written")

    _pair(bench, "ab")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    monkeypatch.setattr(Objects, "upload", unexpected)
    with pytest.raises(StorageError, match="access is denied"):
        _build(bench, url)


def test_of_two_commands_that_make_the_same_dataset_the_second_fails_and_no_files_are_mixed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror.of(url)
    mirror.known.mkdir(parents=True)
    with remote_scratch(mirror, mirror.known / "round-0000", is_spread=False) as later:
        with later.rows.filling("part-00000.parquet") as path:
            path.write_bytes(b"later")
        with monkeypatch.context() as another_machine:
            another_machine.setenv("TRAINSPAN_HOME", str(tmp_path / "another-machine"))
            publish(url, tmp_path / "round-0000", b"first")
        for name in (MANIFEST, LEDGER_FILE):
            (later.about / name).write_text("{}")
        with pytest.raises(DatasetError, match=r"another command created memory://.*/round-0000 in the meantime"):
            later.publish()
    assert (local_dataset(f"{url}/round-0000") / "part-00000.parquet").read_bytes() == b"first"
    assert len(Objects(url).names()) == 3


def test_a_write_whose_answer_was_lost_and_that_is_repeated_counts_as_published(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = MemoryFileSystem.pipe_file

    def twice(self: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        pipe(self, path, value, mode, **more)
        if mode == "create":
            pipe(self, path, value, mode, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", twice)
    publish(url, tmp_path / "round-0000", b"rows")
    assert (local_dataset(f"{url}/round-0000") / "part-00000.parquet").read_bytes() == b"rows"


def test_rows_are_kept_if_it_is_unknown_whether_they_were_published(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = MemoryFileSystem.pipe_file

    def cut_off(self: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        pipe(self, path, value, mode, **more)
        if mode == "create":
            raise TimeoutError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", cut_off)
    with pytest.raises(StorageError, match="no answer"):
        publish(url, tmp_path / "round-0000", b"rows")
    assert (local_dataset(f"{url}/round-0000") / "part-00000.parquet").read_bytes() == b"rows"


def test_a_store_without_conditional_writes_is_asked_first(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = MemoryFileSystem.pipe_file

    def plain(self: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        if mode == "create":
            raise NotImplementedError
        pipe(self, path, value, mode, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", plain)
    publish(url, tmp_path / "round-0000", b"first")
    with pytest.raises(DatasetError, match="another command created"):
        publish(url, tmp_path / "round-0000", b"second")
    assert (local_dataset(f"{url}/round-0000") / "part-00000.parquet").read_bytes() == b"first"


_HOLDS = """
import sys, time
from trainspan_processing.dataset.files import RemoteFiles
from trainspan_schemas.files.objects import Objects
with RemoteFiles(Objects("memory://x")).temporary_folder() as folder:
    (folder / "calls.arrow").write_bytes(b"rows")
    print(folder.parent, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_task_left_on_its_node_is_removed_by_the_next_and_nothing_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    files = RemoteFiles(Objects(url))
    task = subprocess.Popen([sys.executable, "-c", _HOLDS], env=environment, stdout=subprocess.PIPE, text=True)
    assert task.stdout is not None
    left = Path(task.stdout.readline().strip())
    os.utime(left, (0, 0))
    with files.temporary_folder():
        assert [path.name for path in left.glob("files/*")] == ["calls.arrow"]
    task.kill()
    task.wait()
    with files.temporary_folder() as own:
        assert list(own.iterdir()) == []
        assert list(tmp_path.iterdir()) == [own.parent]
    assert list(tmp_path.iterdir()) == []

"""The folder of copied checkpoints: its contents are the trainer's or refused by name, whatever happened before."""

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_schemas.errors import CheckpointError
from trainspan_serving.checkpoints.copies import CopiesFolder, claim_copies
from trainspan_serving.checkpoints.copying import Copying, CopyingError
from trainspan_serving.checkpoints.source import CheckpointSource, CopyFailedError

NAME = "policy-000001"
LONG_BYTES = 100_000
CONFIG = b'{"model_type": "llama"}'


@dataclass
class Trainer:
    """The files of checkpoints by name, and the answers to requests for files before the real ones."""

    url: str = ""
    checkpoints: dict[str, dict[str, bytes]] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)
    """Statuses of the next answers to requests for files."""
    asked: list[str] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    """Until it is set, half of the bytes of a long file are sent."""

    def write(self, name: str, weights: bytes) -> None:
        sha256 = hashlib.sha256(weights).hexdigest()
        meta = CheckpointMeta("full", int(name[-6:]), None, "base", None, sha256)
        folder = {
            "model.safetensors": weights,
            "config.json": CONFIG,
            "trainspan.json": json.dumps(meta_of(meta)).encode(),
        }
        self.checkpoints[name] = folder

    def listed(self, name: str) -> dict[str, Any]:
        files = {
            file: {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
            for file, content in self.checkpoints[name].items()
        }
        return {"checkpoint": name, "files": files}


def meta_of(meta: CheckpointMeta) -> dict[str, Any]:
    return {name: getattr(meta, name) for name in CheckpointMeta.__dataclass_fields__}


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with running_trainer() as one:
        yield one


@contextmanager
def running_trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    trainer.held.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            trainer.asked.append(self.path)
            *_, folder, file = self.path.split("/")
            if file.startswith("policy-"):
                self.answer(200, json.dumps(trainer.listed(file.removesuffix(".json"))).encode())
            elif trainer.before:
                self.answer(trainer.before.pop(0), b"{}")
            else:
                self.answer(200, trainer.checkpoints[folder][file])

        def answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            half = len(content) // 2
            self.wfile.write(content[:half])
            self.wfile.flush()
            if len(content) > LONG_BYTES:
                trainer.held.wait(20)
            self.wfile.write(content[half:])

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    trainer.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield trainer
    finally:
        trainer.held.set()
        http.shutdown()
        thread.join()
        http.server_close()


def copies_of(trainer: Trainer, root: Path) -> CopiesFolder:
    return CopiesFolder(root, CheckpointSource(trainer.url))


def weights(root: Path, name: str = NAME) -> bytes:
    return (root / name / "model.safetensors").read_bytes()


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_copy_of_another_runs_checkpoint_is_replaced(trainer: Trainer, tmp_path: Path) -> None:
    copies = copies_of(trainer, tmp_path)
    trainer.write(NAME, b"old run")
    copies.pull(NAME, None)
    trainer.write(NAME, b"new run")
    copies.pull(NAME, None)
    assert weights(tmp_path) == b"new run"
    assert not list(tmp_path.glob(".old-*"))


def test_another_checkpoint_in_service_and_a_folder_with_other_files_are_refused_by_name(
    trainer: Trainer, tmp_path: Path
) -> None:
    copies = copies_of(trainer, tmp_path)
    trainer.write(NAME, b"old run")
    copies.pull(NAME, None)
    trainer.write(NAME, b"new run")
    with pytest.raises(CopyFailedError, match=f"{NAME} is in service and differs from {NAME} at http"):
        copies.pull(NAME, None, in_use=lambda: {(tmp_path / NAME).resolve()})
    assert weights(tmp_path) == b"old run"
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "latest").touch()
    with pytest.raises(CheckpointError, match="has files that were not copied there: name another folder"):
        copies_of(trainer, tmp_path / "trainer")


def test_a_damaged_copy_is_discarded_unless_it_is_in_use(trainer: Trainer, tmp_path: Path) -> None:
    copies = copies_of(trainer, tmp_path)
    trainer.write(NAME, b"weights")
    copies.pull(NAME, None)
    (tmp_path / NAME / "model.safetensors").write_bytes(b"damaged")
    copies.discard(NAME, None, {(tmp_path / NAME).resolve()})
    assert weights(tmp_path) == b"damaged"
    copies.discard(NAME, None, set())
    copies.pull(NAME, None)
    assert weights(tmp_path) == b"weights"


@pytest.mark.parametrize(
    ("file", "left"),
    [
        ("model.safetensors", None),
        ("model.safetensors", b"wei"),
        ("config.json", None),
        ("config.json", CONFIG.replace(b"llama", b"lllma")),
    ],
)
def test_a_copy_that_lost_a_file_or_its_end_or_has_another_one_is_copied_again(
    trainer: Trainer, tmp_path: Path, file: str, left: bytes | None
) -> None:
    copies = copies_of(trainer, tmp_path)
    trainer.write(NAME, b"weights")
    copies.pull(NAME, None)
    path = tmp_path / NAME / file
    path.unlink() if left is None else path.write_bytes(left)
    copies.pull(NAME, None)
    assert path.read_bytes() == trainer.checkpoints[NAME][file]


def test_without_an_answer_only_a_checkpoint_with_the_wanted_weights_is_taken(trainer: Trainer, tmp_path: Path) -> None:
    trainer.write(NAME, b"weights")
    copies_of(trainer, tmp_path).close()
    copies = copies_of(trainer, tmp_path)
    copies.pull(NAME, None)
    copies.close()
    trainer.url = "http://127.0.0.1:9"
    copies = copies_of(trainer, tmp_path)
    copies.pull(NAME, None, sha256_of(b"weights"))
    for other in (sha256_of(b"others"), None):
        with pytest.raises(CopyFailedError, match=r"http://127\.0\.0\.1:9: the request failed"):
            copies.pull(NAME, None, other)


def test_a_server_that_starts_again_does_not_end_a_copy(trainer: Trainer, tmp_path: Path) -> None:
    trainer.write(NAME, b"weights" * 1000)
    trainer.before = [503, 429]
    copies_of(trainer, tmp_path).pull(NAME, None)
    assert weights(tmp_path) == b"weights" * 1000


@pytest.mark.parametrize(("statuses", "why"), [([500] * 99, "500"), ([403], "403"), ([404], "no such .* object")])
def test_errors_that_stay_end_the_copy(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: list[int], why: str
) -> None:
    monkeypatch.setattr("trainspan_schemas.files.objects._PATIENCE_S", 0.6)
    trainer.write(NAME, b"weights")
    trainer.before = statuses
    with pytest.raises(CopyFailedError, match=why):
        copies_of(trainer, tmp_path).pull(NAME, None)
    assert not trainer.before or len(trainer.before) < 98, "only what may pass is tried again"


HOLDS = """
import sys, time
from pathlib import Path
from trainspan_serving.checkpoints.copies import claim_copies
claim_copies(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_one_live_process_copies_into_a_folder_and_a_killed_one_does_not_count(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(CheckpointError, match="another policy server copies checkpoints into"):
            claim_copies(tmp_path)
        holder.kill()
        holder.wait()
        claim_copies(tmp_path)


def test_unfinished_copies_of_others_are_deleted_and_files_that_are_there_need_no_room(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.write(NAME, b"1" * 1000)
    (tmp_path / ".pull-lock").touch()
    for leftover in (".pull-policy-000009", ".old-policy-000008", f".pull-{NAME}"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model.safetensors").write_bytes(b"1" * 1000)
    rest = len(CONFIG) + len(trainer.checkpoints[NAME]["trainspan.json"])
    for free in (rest - 1, rest):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        if free < rest:
            with pytest.raises(CopyFailedError, match=f"no room for {NAME} in .*: {rest} bytes, {free} are free"):
                copies_of(trainer, tmp_path).pull(NAME, None)
            (tmp_path / ".pull-lock").unlink()
            (tmp_path / ".pull-lock").touch()
    copies_of(trainer, tmp_path).pull(NAME, None)
    assert weights(tmp_path) == b"1" * 1000
    assert {path.name for path in tmp_path.iterdir()} == {NAME, ".pull-lock"}


def test_the_newest_copies_stay_with_those_in_use(trainer: Trainer, tmp_path: Path) -> None:
    names = [f"policy-{version:06d}" for version in range(8, 0, -1)]
    copies = copies_of(trainer, tmp_path)
    for name in names:
        trainer.write(name, name.encode())
        copies.pull(name, None, in_use=lambda: {(tmp_path / names[2]).resolve()})
    assert {path.name for path in tmp_path.glob("policy-*")} == {names[2], *names[5:]}


def run_copying(trainer: Trainer, root: Path, test: Callable[[Copying], Any]) -> None:
    copies = copies_of(trainer, root)
    asyncio.run(test(Copying(copies, set)))


def test_a_long_copy_is_answered_with_its_progress_and_joined(trainer: Trainer, tmp_path: Path) -> None:
    trainer.write(NAME, b"w" * 4_000_000)

    async def test(copying: Copying) -> None:
        trainer.held.clear()
        with pytest.raises(CopyingError, match="is being copied"):
            await copying.fetch(NAME, None, None, within_s=0.2)
        trainer.held.set()
        await copying.fetch(NAME, None, None, within_s=20)
        with pytest.raises(CopyFailedError):
            await copying.fetch("policy-000002", None, None, within_s=20)

    trainer.checkpoints["policy-000002"] = {"../up": b""}
    run_copying(trainer, tmp_path, test)
    assert weights(tmp_path) == b"w" * 4_000_000
    assert trainer.asked.count(f"/{NAME}.json") == 1


def test_a_copy_that_failed_is_tried_again_when_it_is_asked_for_again(trainer: Trainer, tmp_path: Path) -> None:
    trainer.write(NAME, b"weights")
    listed = trainer.checkpoints[NAME]
    trainer.checkpoints[NAME] = {"../up": b""}

    async def test(copying: Copying) -> None:
        with pytest.raises(CopyFailedError):
            await copying.fetch(NAME, None, None, within_s=20)
        trainer.checkpoints[NAME] = listed
        await copying.fetch(NAME, None, None, within_s=20)

    run_copying(trainer, tmp_path, test)
    assert weights(tmp_path) == b"weights"


def test_the_copy_of_a_superseded_checkpoint_ends_unless_the_other_gives_way(trainer: Trainer, tmp_path: Path) -> None:
    trainer.write(NAME, b"w" * 4_000_000)
    trainer.write("policy-000002", b"v" * 100)

    async def test(copying: Copying) -> None:
        first = asyncio.create_task(copying.fetch(NAME, None, None, within_s=20))
        while not trainer.asked:
            await asyncio.sleep(0.01)
        with pytest.raises(CopyFailedError, match="is not copied while another"):
            await copying.fetch("policy-000002", None, None, within_s=20, yields_to_others=True)
        trainer.held.clear()
        second = asyncio.create_task(copying.fetch("policy-000002", None, None, within_s=20))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        trainer.held.set()
        with pytest.raises(CopyFailedError, match="another checkpoint is wanted"):
            await first
        await second
        assert time.monotonic() - began < 15

    trainer.held.clear()
    run_copying(trainer, tmp_path, test)
    assert not (tmp_path / NAME).exists()
    assert weights(tmp_path, "policy-000002") == b"v" * 100


def test_a_long_copy_holds_up_neither_other_policies_nor_a_damaged_copy(trainer: Trainer, tmp_path: Path) -> None:
    """A swap discards a damaged copy while no other change is admitted, so it must not wait for the network."""
    trainer.write(NAME, b"weights")
    trainer.write("policy-000002", b"w" * 4_000_000)

    async def test(copying: Copying) -> None:
        for policy in ("a", "b"):
            await copying.fetch(NAME, policy, None, within_s=20)
        (tmp_path / "a" / NAME / "model.safetensors").write_bytes(b"damaged")
        trainer.held.clear()
        with pytest.raises(CopyingError):
            await copying.fetch("policy-000002", "a", None, within_s=0.2)
        async with asyncio.timeout(5):
            await copying.discard(NAME, "a")
            assert not (tmp_path / "a" / NAME).exists()
            await copying.fetch(NAME, "b", None, within_s=5)
        trainer.held.set()
        await copying.fetch("policy-000002", "a", None, within_s=20)

    run_copying(trainer, tmp_path, test)
    assert weights(tmp_path / "a", "policy-000002") == b"w" * 4_000_000

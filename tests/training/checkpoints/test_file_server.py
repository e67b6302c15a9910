"""`trainspan weights`: which checkpoint it names, how it finds files, and clients without a token."""

import http.client
import json
import os
import shutil
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path

from tests.support.policy_server.weights import weights_server
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, hash_weights, write_latest
from trainspan_training.checkpoints.file_server import CheckpointCatalog
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry


def write(root: Path, version: int) -> Path:
    folder = root / f"policy-{version:06d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(1000))
    (folder / "tokenizer.json").write_text("{}")
    CheckpointMeta("full", version, None, "base", None, hash_weights(folder)).write(folder)
    write_latest(root, folder.name)
    return folder


def test_latest_is_the_last_accepted_checkpoint_not_the_last_written_one(tmp_path: Path) -> None:
    catalog = CheckpointCatalog(tmp_path)
    first, _ = write(tmp_path, 1), write(tmp_path, 2)
    assert catalog.latest(None) is None, "no canary has seen one yet"
    CheckpointLedger(tmp_path).append(LedgerEntry("published", None, first.name))
    named = {"checkpoint": first.name, "version": 1, "weights_sha256": hash_weights(first)}
    assert catalog.latest(None) == named


def test_a_file_of_two_checkpoints_is_found_after_one_of_them_is_deleted(tmp_path: Path) -> None:
    catalog = CheckpointCatalog(tmp_path)
    for version in (1, 2):
        write(tmp_path, version)
    one, two = (catalog.files(f"policy-{version:06d}", None) for version in (1, 2))
    assert one is not None
    assert two is not None
    sha256 = one.files["tokenizer.json"].sha256
    assert sha256 == two.files["tokenizer.json"].sha256
    shutil.rmtree(tmp_path / "policy-000002")
    assert catalog.path_of(sha256) == tmp_path / "policy-000001" / "tokenizer.json"


def test_weights_are_not_hashed_if_the_trainer_has_stored_their_hashes(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    stored = {"model.safetensors": "ab" * 32}
    replace(CheckpointMeta.read(folder), weights_files=stored).write(folder)
    listed = CheckpointCatalog(tmp_path).files(folder.name, None)
    assert listed is not None
    assert listed.files["model.safetensors"].sha256 == "ab" * 32
    assert listed.files["tokenizer.json"].sha256 == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_silent_connections_without_a_token_do_not_keep_others_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoints", 1)
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    with weights_server(tmp_path / "checkpoints", tmp_path) as url:
        address = url.removeprefix("http://")
        host, _, port = address.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(300)]
        request = urllib.request.Request(f"{url}/checkpoints/{folder.name}", headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.loads(answer.read())["checkpoint"] == folder.name
        for connection in silent:
            connection.close()
        refused = http.client.HTTPConnection(address, timeout=20)
        refused.request("GET", "/latest")
        with refused.getresponse() as answer:
            assert (answer.status, answer.getheader("connection")) == (401, "close")
        refused.close()

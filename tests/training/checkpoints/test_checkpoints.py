"""The checkpoints folder: kills at every file operation, refusals, pruning, the lock."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, read_latest
from trainspan_schemas.errors import CheckpointError
from trainspan_training.checkpoints import folder as folder_module
from trainspan_training.checkpoints.folder import Checkpoints, accepted_checkpoint
from trainspan_training.checkpoints.ledger import CheckpointLedger, Event, LedgerEntry

DIES = """
import os, sys
from pathlib import Path
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.checkpoints.ledger import LedgerEntry

root, action, left = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
checkpoints = Checkpoints(root)

def die_at_the_last_operation(event, _):
    global left
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
        left -= 1
        if left < 0:
            os._exit(9)

sys.addaudithook(die_at_the_last_operation)
if action == "write":
    meta = CheckpointMeta("full", 2, "policy-000001", "base", "b")
    folder = checkpoints.begin_checkpoint(meta)
    (folder / "model.safetensors").write_text("2")
    meta.write(folder)
    checkpoints.commit(meta)
    checkpoints.prune(1)
else:
    checkpoints.refuse(checkpoints.latest(), "stale canary")
os._exit(0)
"""


def write(checkpoints: Checkpoints, version: int, dataset: str) -> Path:
    parent = f"policy-{version - 1:06d}" if version > 1 else "/models/base"
    meta = CheckpointMeta("full", version, parent, "/models/base", dataset)

    temporary = checkpoints.begin_checkpoint(meta)
    (temporary / "model.safetensors").write_text(str(version))
    meta.write(temporary)
    folder = checkpoints.commit(meta)
    write_state(checkpoints, folder.name, 2)
    return folder


def write_state(checkpoints: Checkpoints, name: str, parts: int, of: int = 2) -> None:
    state = checkpoints.state_folder(name)
    state.mkdir(parents=True, exist_ok=True)
    for part in range(1, parts + 1):
        (state / f"part-{part:05d}-of-{of:05d}.safetensors").write_text("state")


def prepare(root: Path, versions: int) -> None:
    checkpoints = Checkpoints(root)
    for version in range(1, versions + 1):
        write(checkpoints, version, "ab"[version - 1])
        checkpoints.ledger.append(LedgerEntry("published", "ab"[version - 1], f"policy-{version:06d}"))
    checkpoints.close()


def die(root: Path, action: str, operations: int) -> int:
    command = [sys.executable, "-c", DIES, str(root), action, str(operations)]
    return subprocess.run(command, timeout=60, check=False).returncode


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.name.startswith(("policy", ".tmp"))}


def test_a_kill_at_any_file_operation_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    outcomes = set()
    for operations in range(60):
        root = tmp_path / str(operations)
        prepare(root, 1)
        code = die(root, "write", operations)
        checkpoints = Checkpoints(root)
        latest, consumed = checkpoints.latest(), checkpoints.ledger.of_dataset("b")
        assert latest is not None
        outcomes.add((code, latest.name))
        if latest.name == "policy-000001":
            assert consumed is None
            assert names(root) == {"policy-000001"}
            latest = write(checkpoints, 2, "b")
        else:
            assert consumed == LedgerEntry("trained", "b", "policy-000002", parent="policy-000001")
            assert checkpoints.pending() == latest
        assert latest.name == "policy-000002"
        assert (latest / "model.safetensors").read_text() == "2"
        assert CheckpointMeta.read(latest).version == 2
        assert names(root) == {"policy-000001", "policy-000002"}
        checkpoints.close()
        if code == 0:
            break
    assert outcomes == {(9, "policy-000001"), (9, "policy-000002"), (0, "policy-000002")}


@pytest.mark.ci
def test_a_kill_at_any_file_operation_of_a_refusal_is_made_up_for(tmp_path: Path) -> None:
    outcomes = set()
    for operations in range(60):
        root = tmp_path / str(operations)
        prepare(root, 2)
        code = die(root, "refuse", operations)
        checkpoints = Checkpoints(root)
        latest = checkpoints.latest()
        assert latest is not None
        outcomes.add((code, latest.name))
        if latest.name == "policy-000001":
            assert names(root) == {"policy-000001", "policy-000002.refused"}
            assert checkpoints.ledger.of_dataset("b") == LedgerEntry("refused", "b", "policy-000002", "stale canary")
            assert not checkpoints.state_folder("policy-000002").exists()
            assert write(checkpoints, 2, "c").name == "policy-000002"
        else:
            assert names(root) == {"policy-000001", "policy-000002"}
        checkpoints.close()
        if code == 0:
            break
    assert outcomes == {(9, "policy-000001"), (9, "policy-000002"), (0, "policy-000001")}


@pytest.mark.parametrize("failing", ["entry", "latest"])
def test_a_checkpoint_that_cannot_be_committed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    prepare(tmp_path, 1)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    checkpoints, append = Checkpoints(tmp_path), CheckpointLedger.append

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    def fail_after_writing(ledger: CheckpointLedger, entry: LedgerEntry) -> None:
        append(ledger, entry)
        fail()

    with monkeypatch.context() as patch:
        if failing == "entry":
            patch.setattr(CheckpointLedger, "append", fail_after_writing)
        else:
            patch.setattr(folder_module, "write_latest", fail)
        with pytest.raises(OSError, match="No space left"):
            write(checkpoints, 2, "b")
    assert checkpoints.ledger.of_dataset("b") is None
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == tmp_path / "policy-000001"
    assert checkpoints.ledger.of_dataset("b") is None, "the dataset is trained now"
    assert names(tmp_path) == {"policy-000001"}
    assert write(checkpoints, 2, "b").name == "policy-000002"


def test_a_checkpoint_that_latest_names_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`_recover` would come to the same state if `latest` were lost."""
    prepare(tmp_path, 1)
    checkpoints, sync = Checkpoints(tmp_path), folder_module.sync

    def fail_last(path: Path) -> None:
        if path == tmp_path and (tmp_path / "latest").read_text().strip() == "policy-000002":
            raise OSError("Input/output error")
        sync(path)

    monkeypatch.setattr(folder_module, "sync", fail_last)
    assert write(checkpoints, 2, "b") == checkpoints.latest() == tmp_path / "policy-000002"
    assert checkpoints.ledger.of_dataset("b") == LedgerEntry("trained", "b", "policy-000002", parent="policy-000001")


def test_a_refused_first_checkpoint_leaves_no_latest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.refuse(write(checkpoints, 1, "a"), "bad") is None
    assert read_latest(tmp_path) is None
    assert write(checkpoints, 1, "b").name == "policy-000001"


def test_a_number_means_the_same_weights_forever(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1, "a")
    checkpoints.refuse(write(checkpoints, 2, "b"), "stale canary")
    assert checkpoints.next_version(1) == 3
    (tmp_path / "policy-000002.refused").rename(tmp_path / "elsewhere")
    assert checkpoints.next_version(1) == 3, "the ledger has it, too"


def test_accepted_is_what_a_server_took_and_nothing_took_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    folders = {version: write(checkpoints, version, str(version)) for version in (1, 2, 3)}

    def after(event: Event, version: int) -> Path | None:
        checkpoints.ledger.append(LedgerEntry(event, str(version), folders[version].name))
        return accepted_checkpoint(tmp_path)

    assert accepted_checkpoint(tmp_path) is None
    assert after("unpublished", 1) is None, "no canary has seen it"
    assert after("published", 1) == folders[1]
    assert after("published", 2) == folders[2]
    assert after("unpublished", 3) == folders[2]
    assert after("withdrawn", 2) == folders[1]
    assert after("published", 3) == folders[3]
    assert after("refused", 3) == folders[1]
    assert after("published", 2) == folders[2]
    shutil.rmtree(folders[2])
    assert accepted_checkpoint(tmp_path) == folders[1]


@pytest.mark.parametrize(("event", "is_pending"), [("published", False), ("unpublished", True)])
def test_a_checkpoint_is_pending_until_a_policy_server_has_it(tmp_path: Path, event: Event, is_pending: bool) -> None:
    checkpoints = Checkpoints(tmp_path)
    folder = write(checkpoints, 1, "a")
    assert checkpoints.pending() == folder
    checkpoints.ledger.append(LedgerEntry(event, "a", folder.name))
    assert checkpoints.pending() == (folder if is_pending else None)


def test_pruning_keeps_the_newest_and_the_last_two_optimizer_states(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for version in range(1, 6):
        write(checkpoints, version, f"dataset {version}")
    checkpoints.prune(3)
    assert names(tmp_path) == {"policy-000003", "policy-000004", "policy-000005"}
    checkpoints.prune(1)
    assert names(tmp_path) == {"policy-000004", "policy-000005"}, "latest and its parent stay"
    states = {path.name for path in (tmp_path / "optimizer").iterdir()}
    assert states == {"policy-000004", "policy-000005"}
    assert all(checkpoints.ledger.of_dataset(f"dataset {version}") for version in range(1, 6))


def test_pruning_keeps_what_a_server_that_is_behind_serves(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for version in range(1, 7):
        write(checkpoints, version, f"dataset {version}")
        event: Event = "published" if version in (1, 3) else "unpublished"
        checkpoints.ledger.append(LedgerEntry(event, f"dataset {version}", f"policy-{version:06d}"))
    checkpoints.prune(1, {"policy-000002", "another-model"})
    assert names(tmp_path) == {f"policy-{version:06d}" for version in (2, 3, 5, 6)}
    checkpoints.prune(1)
    assert names(tmp_path) == {f"policy-{version:06d}" for version in (3, 5, 6)}


def test_a_state_counts_once_all_of_its_parts_are_there_and_is_cleared_away_otherwise(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for version, parts in ((1, 3), (2, 2)):
        folder = write(checkpoints, version, f"dataset {version}")
        shutil.rmtree(checkpoints.state_folder(folder.name))
        write_state(checkpoints, folder.name, parts, of=3)
    write_state(checkpoints, "policy-000003", 3, of=3)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path)
    assert len(checkpoints.state_files("policy-000001")) == 3
    assert checkpoints.state_files("policy-000002") == []
    assert [path.name for path in (tmp_path / "optimizer").iterdir()] == ["policy-000001"], "no state without a policy"


def test_a_second_trainer_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="another trainer is using"):
        Checkpoints(tmp_path)
    checkpoints.close()
    Checkpoints(tmp_path).close()


def test_a_line_of_the_ledger_torn_by_a_kill_is_ignored_and_spoils_no_other(tmp_path: Path) -> None:
    CheckpointLedger(tmp_path).append(LedgerEntry("trained", "a", "policy-000001"))
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"event": "publ')
    CheckpointLedger(tmp_path).append(LedgerEntry("skipped", "b"))
    assert CheckpointLedger(tmp_path).entries == [
        LedgerEntry("trained", "a", "policy-000001"),
        LedgerEntry("skipped", "b"),
    ]


def test_a_lost_ledger_is_made_again_from_the_checkpoints(tmp_path: Path) -> None:
    prepare(tmp_path, 2)
    (tmp_path / "ledger.jsonl").unlink()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.ledger.of_dataset("a")
    assert checkpoints.ledger.of_dataset("b")

"""The checkpoints folder: complete checkpoints only, `latest`, optimizer states, and recovery after a kill.

```
checkpoints/policy-000003/             loaded by a policy server
checkpoints/policy-000004.refused/     refused by a policy server; kept for inspection
checkpoints/optimizer/policy-000003/part-00001-of-00002.safetensors
checkpoints/tokens/policy-000003/part-00001-of-00002.parquet
checkpoints/latest  ledger.jsonl  metrics.jsonl
```
A checkpoint is written under a temporary name, then renamed; then `latest` is updated. After a kill at any moment,
`Checkpoints._recover` rolls forward to the nearest complete state. Adam's state is written after the checkpoint: a kill
in between leaves a checkpoint without it, and the trainer rebuilds the state from the parent's state and the dataset.
The figures of trained tokens are written before it, so that a checkpoint with a state has all that it will have.
"""

import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, checkpoint_name, read_latest, write_latest
from trainspan_schemas.artifacts.trained_tokens import tokens_dir
from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.files.durable import sync
from trainspan_schemas.files.locks import locked, try_lock
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry

__all__ = [
    "KEEP_OPTIMIZERS",
    "PROJECT",
    "Checkpoints",
    "RolledBackError",
    "accepted_checkpoint",
    "complete_checkpoints",
    "latest_held",
    "run_name",
    "version_in",
]

KEEP_OPTIMIZERS = 2
_NAME = re.compile(r"policy-(\d{6,})")
_TEMPORARY = ".tmp-"
_REFUSED = ".refused"


PROJECT = "trainspan"


class RolledBackError(CheckpointError):
    """An earlier checkpoint was put back in service while this one was made."""


@contextmanager
def latest_held(root: Path) -> Iterator[None]:
    """Holds `latest` and the ledger's end for one change by one process."""
    with locked(root / ".latest-lock"):
        yield


def complete_checkpoints(root: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first."""
    folders = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=_version)


def accepted_checkpoint(root: Path) -> Path | None:
    """Folder of the last checkpoint that a policy server took and that still counts; None if there is none.

    `latest` may be newer: it names a checkpoint before its canary.
    """
    folders = (root / name for name in reversed(CheckpointLedger(root).accepted()))
    return next((folder for folder in folders if _NAME.fullmatch(folder.name) and folder.is_dir()), None)


def _version(folder: Path) -> int:
    return version_in(folder.name) or 0


def version_in(name: str | None) -> int | None:
    """The number in the name of a checkpoint, also of a refused one."""
    match = _NAME.fullmatch((name or "").removesuffix(_REFUSED))
    return int(match[1]) if match else None


class Checkpoints:
    """One trainer's lock on a checkpoints folder. Raises CheckpointError if it is no folder, or another trainer holds it."""

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise CheckpointError(f"{root} is not a folder: choose another --checkpoints") from error
        self.root = root
        self._lock = (root / ".lock").open("w")
        if not try_lock(self._lock):
            self._lock.close()
            raise CheckpointError(f"another trainer is using {root}: stop it, or choose another --checkpoints")
        self.ledger = CheckpointLedger(root)
        self._recover()

    def close(self) -> None:
        self._lock.close()

    def latest(self) -> Path | None:
        """Folder of the newest good checkpoint."""
        return read_latest(self.root)

    def pending(self) -> Path | None:
        """`latest`, if it was not swapped in: the trainer was stopped first, or the server was busy or unreachable."""
        latest = self.latest()
        entry = latest and self.ledger.of_checkpoint(latest.name)
        return latest if entry and entry.event in ("trained", "unpublished") else None

    def state_folder(self, name: str) -> Path:
        """The folder with the parts of a checkpoint's optimizer state."""
        return self.root / "optimizer" / name

    def state_files(self, name: str) -> list[Path]:
        """The parts of a checkpoint's optimizer state; empty unless it is complete."""
        files = sorted(self.state_folder(name).glob("part-*.safetensors"))
        expected = int(files[0].stem.rpartition("-")[2]) if files else 0
        return files if len(files) == expected else []

    def lacks_state(self, name: str) -> bool:
        """Whether a checkpoint has no complete optimizer state, though its round made one.

        The model that a run starts from, written as a checkpoint, never had one.
        """
        return not self.state_files(name) and CheckpointMeta.read(self.root / name).dataset_sha256 is not None

    def begin_tokens(self, name: str) -> Path:
        """The folder for the figures of the tokens that a checkpoint was trained on; deletes any earlier ones."""
        folder = tokens_dir(self.root, name)
        if folder.exists():
            _delete(folder)
        return folder

    def begin_checkpoint(self, meta: CheckpointMeta) -> Path:
        """Creates an empty folder for a new checkpoint; `commit` or `discard` it."""
        name = checkpoint_name(meta.version)
        if (self.root / name).exists():
            raise CheckpointError(
                f"{self.root / name} exists, but {self.root / 'latest'} names an older checkpoint: move one of them away"
            )
        self.discard(meta)
        temporary = self.root / (_TEMPORARY + name)
        temporary.mkdir()
        return temporary

    def next_version(self, parent: int) -> int:
        """The first version that no checkpoint of this folder has or had: a number means the same weights forever.

        Servers may still have copies of those that were refused, withdrawn or deleted.
        """
        names = [*(path.name for path in self.root.iterdir()), *(entry.checkpoint for entry in self.ledger.entries)]
        return max([parent, *(version for name in names if (version := version_in(name)) is not None)]) + 1

    def reload(self) -> None:
        """Reads again what `trainspan swap` may have changed."""
        self.ledger.reload()

    @contextmanager
    def still_latest(self, name: str | None) -> Iterator[None]:
        """Holds `latest` as `latest_held` does. Raises RolledBackError if it names another checkpoint."""
        with latest_held(self.root):
            latest = self.latest()
            if latest is not None and latest.name != name:
                raise RolledBackError(f"{latest.name} was put back in service during the round")
            yield

    def commit(self, meta: CheckpointMeta) -> Path:
        """Publishes the checkpoint on disk: the dataset is consumed, and `latest` names the returned folder.

        Raises OSError if it cannot be published (neither checkpoint nor entry is left), RolledBackError if `latest`
        names another checkpoint than its parent.
        """
        name = checkpoint_name(meta.version)
        temporary, folder = self.root / (_TEMPORARY + name), self.root / name
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        with self.still_latest(meta.parent):
            temporary.rename(folder)
            try:
                with self.ledger.undone_on_error():
                    sync(self.root)
                    self._consume(folder, meta)
                    write_latest(self.root, name)
            except OSError:
                _delete(folder)
                raise
            with suppress(OSError):  # `_recover` makes up for a `latest` that is lost
                sync(self.root)
        return folder

    def discard(self, meta: CheckpointMeta) -> None:
        """Deletes everything written since `begin` for a checkpoint and its optimizer state."""
        name = checkpoint_name(meta.version)
        for leftover in (self.root / (_TEMPORARY + name), self.state_folder(name), tokens_dir(self.root, name)):
            if leftover.exists():
                _delete(leftover)

    def refuse(self, folder: Path, reason: str) -> Path | None:
        """Marks `latest` as refused by the policy server and reverts to its parent, which is returned, if any."""
        meta = CheckpointMeta.read(folder)
        self.ledger.append(LedgerEntry("refused", meta.dataset_sha256, folder.name, reason))
        self._set_aside(folder, meta)
        return self.latest()

    def prune(self, keep: int, served: Collection[str] = ()) -> None:
        """Deletes all but the newest `keep` checkpoints with their tokens' figures, and old optimizer states.

        Never deletes `latest`, its parent, or what a policy server serves and falls back to if a swap fails: the
        folders that it reports (`served`), and the last checkpoint swapped in.
        """
        latest = self.latest()
        parent = CheckpointMeta.read(latest).parent if latest else None
        protected = {latest.name if latest else None, parent, *self.ledger.accepted()[-1:], *served}
        for folder in self._folders()[: -max(keep, 1)]:
            if folder.name not in protected:
                _delete(folder)
        for folder in sorted(self.root.glob(f"policy-*{_REFUSED}"), key=_version)[:-1]:
            _delete(folder)
        for state in self._states()[:-KEEP_OPTIMIZERS]:
            if state.name not in protected:
                _delete(state)
        self._drop_tokens()

    def _drop_tokens(self) -> None:
        """Deletes the figures of tokens whose checkpoint is gone."""
        for folder in (self.root / "tokens").glob("policy-*"):
            if not (self.root / folder.name).exists():
                _delete(folder)

    def _states(self) -> list[Path]:
        """Folders of optimizer states, oldest first."""
        return sorted(path for path in (self.root / "optimizer").glob("policy-*") if path.is_dir())

    def _folders(self) -> list[Path]:
        return complete_checkpoints(self.root)

    def _recover(self) -> None:
        for directory in (self.root, self.root / "optimizer", self.root / "tokens"):
            for leftover in directory.glob(f"{_TEMPORARY}*"):
                _delete(leftover)
        for leftover in (self.root / "tokens").glob(f"policy-*/{_TEMPORARY}*"):
            _delete(leftover)
        self._drop_tokens()
        for state in self._states():
            if not self.state_files(state.name) or not (self.root / state.name).exists():
                _delete(state)
        for folder in self._folders():
            meta = CheckpointMeta.read(folder)
            entry = self.ledger.of_checkpoint(folder.name)
            if self.ledger.is_withdrawn(folder.name):
                continue
            if entry and entry.event == "refused" and entry.dataset == meta.dataset_sha256:
                self._set_aside(folder, meta)
            else:
                self._consume(folder, meta)
        latest = self.latest()
        for folder in self._folders():
            parent = CheckpointMeta.read(folder).parent or ""
            if self.ledger.is_withdrawn(folder.name):
                continue
            if parent == latest.name if latest else not _NAME.fullmatch(parent):
                write_latest(self.root, folder.name)
                break

    def _consume(self, folder: Path, meta: CheckpointMeta) -> None:
        """Enters the dataset of a complete checkpoint into the ledger, once."""
        entry = self.ledger.of_checkpoint(folder.name)
        if entry is None or entry.dataset != meta.dataset_sha256:
            self.ledger.append(LedgerEntry("trained", meta.dataset_sha256, folder.name, parent=meta.parent))

    def _set_aside(self, folder: Path, meta: CheckpointMeta) -> None:
        latest = self.root / "latest"
        if latest.exists() and latest.read_text().strip() == folder.name:
            if meta.parent and (self.root / meta.parent).is_dir() and _NAME.fullmatch(meta.parent):
                write_latest(self.root, meta.parent)
            else:
                latest.unlink()
        aside = folder.with_name(folder.name + _REFUSED)
        if aside.exists():
            _delete(aside)
        for companion in (self.state_folder(folder.name), tokens_dir(self.root, folder.name)):
            if companion.exists():
                _delete(companion)
        folder.rename(aside)
        sync(self.root)


def _delete(path: Path) -> None:
    """Renames a file or folder to a temporary name and deletes it, so that no partial checkpoint is ever visible."""
    if not path.name.startswith(_TEMPORARY):
        path = path.rename(path.with_name(f"{_TEMPORARY}{path.name}"))
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def run_name(checkpoints: Path) -> str:
    """Name of the closest parent folder that is not hidden; under `trainspan loop`, the run's id."""
    above = checkpoints.resolve().parents
    return next((folder.name for folder in above if folder.name and not folder.name.startswith(".")), PROJECT)

"""Publishes small datasets under a URL."""

import hashlib
import json
from pathlib import Path

from trainspan_processing.dataset.mirror import Mirror
from trainspan_processing.dataset.scratch import remote_scratch
from trainspan_schemas.artifacts.dataset import LEDGER_FILE, MANIFEST, about_dir


def publish(url: str, folder: Path, *parts: bytes) -> None:
    """Publishes a dataset with these files, as the folder's number."""
    files = [(f"part-{number:05d}.parquet", content) for number, content in enumerate(parts)]
    listed = [{"name": name, "sha256": hashlib.sha256(content).hexdigest()} for name, content in files]
    with remote_scratch(Mirror.of(url), Mirror.of(url).known / folder.name, is_spread=False) as scratch:
        for name, content in files:
            with scratch.rows.filling(name) as path:
                path.write_bytes(content)
        (scratch.about / MANIFEST).write_text(json.dumps({"version": 3, "files": listed}))
        (scratch.about / LEDGER_FILE).write_text("")
        scratch.publish()


def publish_folder(mirror: Mirror, folder: Path) -> None:
    """Publishes a local dataset."""
    with remote_scratch(mirror, mirror.known / folder.name, is_spread=False) as scratch:
        for path in folder.iterdir():
            with scratch.rows.filling(path.name) as unfinished:
                unfinished.write_bytes(path.read_bytes())
        (scratch.about / MANIFEST).write_bytes((about_dir(folder) / MANIFEST).read_bytes())
        (scratch.about / LEDGER_FILE).write_text("")
        scratch.publish()

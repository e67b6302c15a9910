"""The files that `tasks.py` of each task writes, and the rule that decides what is held out."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["is_heldout", "read_lines", "write_lines", "write_tasks"]


def is_heldout(key: str, percent: int = 20) -> bool:
    """Whether what `key` names (a template, a product, a game) is held out: `percent` of all keys, by a hash."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % 100 < percent


def write_tasks(folder: Path, tasks: Sequence[dict[str, Any]], demonstrations: Sequence[dict[str, Any]]) -> None:
    """Writes `tasks.jsonl` for the loop, and `demonstrations.jsonl`: conversations for a supervised warm start."""
    for name, lines in (("demonstrations.jsonl", demonstrations), ("tasks.jsonl", tasks)):
        write_lines(folder / name, lines)


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes a file of JSON lines, at once or not at all; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    temporary.replace(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]

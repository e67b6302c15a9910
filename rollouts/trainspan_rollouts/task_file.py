"""Task files: JSON lines, CSV or Parquet, one task per line or row, read as a stream.

Fields: `id` and `input`; optional: `answer` (for the judge only), `split` ("train" or "val") and `meta`.

A row with `messages` in place of `input` is one of OpenAI's fine-tuning files. The input is then what a request for the last
answer has: the messages before it, and tools and response format. The answer is that answer, or `reference_answer`, and
`meta` is the whole row, which a grader calls `item`.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, cast

from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.errors import TaskFileError, pip_install
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry.identity import Split
from trainspan_schemas.telemetry.utf8 import well_formed

__all__ = ["Task", "count_tasks", "read_tasks", "task_fields", "to_task"]

_FIELDS: Final = frozenset({"id", "input", "answer", "split", "meta"})
_MAX_FIELD_CHARS: Final = 16 * 1024 * 1024
_HASH_BITS: Final = 27
"""A table of 16 MiB: of a million ids, one in 270 is checked twice."""


@dataclass(frozen=True, slots=True)
class Task:
    """One input to the agent, with what is needed to judge it."""

    id: str
    input: Any
    answer: Any = None
    split: Split | None = None
    meta: Any = None

    def digest(self) -> str:
        """Of everything that its rollouts and their verdicts depend on."""
        return _digest(self.for_judge())

    def for_agent(self) -> JsonObject:
        """Returns the fields that the agent may see."""
        return {"id": self.id, "input": self.input}

    def for_judge(self) -> JsonObject:
        """Returns all fields."""
        return asdict(self)


def _digest(fields: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(fields, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def count_tasks(path: Path, split: Split | None = None) -> int:
    """Checks the whole file and counts the tasks of `read_tasks`. Memory does not grow with the file.

    Raises TaskFileError, with the number of the first line or row that is not a task or repeats an id.
    """
    marks = bytearray(2**_HASH_BITS // 8)
    suspects: set[str] = set()
    count = total = 0
    for _, task in _tasks(path):
        total += 1
        count += _is_wanted(task, split)
        bit = int.from_bytes(blake2b(task.id.encode(), digest_size=8).digest(), "little") % 2**_HASH_BITS
        if marks[bit >> 3] & (1 << (bit & 7)):
            suspects.add(task.id)
        marks[bit >> 3] |= 1 << (bit & 7)
    if not total:
        raise TaskFileError(f"{path} has no tasks")
    if suspects:
        _check_repeated(path, suspects)
    return count


def read_tasks(path: Path, split: Split | None = None) -> Iterator[Task]:
    """Yields the tasks of a file, in order; with `split`, without tasks marked for the other split.

    Raises TaskFileError, with the number of the first line or row that is not a task.
    """
    return (task for _, task in _tasks(path) if _is_wanted(task, split))


def _is_wanted(task: Task, split: Split | None) -> bool:
    return split is None or task.split in (None, split)


def _tasks(path: Path) -> Iterator[tuple[str, Task]]:
    return ((where, to_task(where, fields)) for where, fields in _rows(path))


def _check_repeated(path: Path, suspects: set[str]) -> None:
    """Raises TaskFileError if an id is repeated. `suspects` share the hash of an earlier id; most differ from it."""
    met: set[str] = set()
    for where, task in _tasks(path):
        if task.id not in suspects:
            continue
        if task.id in met:
            raise TaskFileError(f"{where}: the id {task.id!r} occurs a second time; ids must be unique within a file")
        met.add(task.id)


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv_rows, ".parquet": _parquet_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TaskFileError(f"{path}: a task file must end in {', '.join(readers)}")
    if not path.is_file():
        raise TaskFileError(f"no task file {path}")
    return reader(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            yield where, task_fields(where, line)


def task_fields(where: str, line: bytes) -> JsonObject:
    """The object in a line. Raises TaskFileError."""
    try:
        fields = well_formed(json.loads(line), where)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise TaskFileError(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise TaskFileError(f'{where}: not an object; write {{"id": …, "input": …}}')
    return fields


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    csv.field_size_limit(_MAX_FIELD_CHARS)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        while True:
            try:
                row = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:
                raise TaskFileError(f"{path}:{reader.reader.line_num}: not CSV ({error})") from error
            if row is None:
                return
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise TaskFileError(
                    f"{where}: its number of fields is not the header's ({len(reader.fieldnames or [])})"
                )
            yield where, {key: value for key, value in row.items() if value or key in ("id", "input")}


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise TaskFileError(
            f"{path}: Parquet needs pyarrow: {pip_install('processing')}, or write the tasks as JSON lines"
        ) from error
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", {key: value for key, value in row.items() if value is not None}
    except (pa.ArrowException, OSError) as error:
        raise TaskFileError(f"{path}: not Parquet ({' '.join(str(error).split())})") from error


_REQUEST: Final = ("tools", "parallel_tool_calls", "response_format", "functions")
"""Fields of a fine-tuning row that are those of a request."""


def to_task(where: str, fields: Mapping[str, Any]) -> Task:
    if "messages" in fields and "input" not in fields:
        fields = _of_fine_tuning(where, fields)
    if unknown := sorted(set(fields) - _FIELDS):
        raise TaskFileError(f"{where}: unknown field {unknown[0]!r}; fields are id, input, answer, split, meta")
    task_id = fields.get("id")
    if isinstance(task_id, bool) or not isinstance(task_id, (str, int)) or task_id == "":
        raise TaskFileError(
            f"{where}: the field 'id' is {'missing' if task_id is None else f'{task_id!r}'}; it must be text or an integer"
        )
    if re.search(BRANCH_TASK, str(task_id)):
        raise TaskFileError(
            f"{where}: the id {task_id!r} has the form of a branch's, TASK@ROLLOUT.ATTEMPT@CALL, which is compared in another way: "
            "use another id"
        )
    if fields.get("input") is None:
        raise TaskFileError(f"{where}: task {str(task_id)!r} has no field 'input'")
    split = fields.get("split")
    if split not in (None, "train", "val"):
        raise TaskFileError(f"{where}: split {split!r} is neither 'train' nor 'val'")
    return Task(str(task_id), fields["input"], fields.get("answer"), cast("Split | None", split), fields.get("meta"))


def _of_fine_tuning(where: str, row: Mapping[str, Any]) -> JsonObject:
    """The fields of the task of a fine-tuning row. Its id is a hash of the row, so two equal rows have the same."""
    messages = row["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise TaskFileError(f"{where}: 'messages' is not a list of messages, each with a role")
    asked = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    last = asked.pop() if asked and asked[-1]["role"] == "assistant" else None
    if not asked or asked[-1]["role"] not in ("user", "tool", "function"):
        raise TaskFileError(
            f"{where}: 'messages' has no question: the last one, or the one before an answer, is a user's"
        )
    answer = row.get("reference_answer")
    if answer is None and last is not None:
        answer = last["content"] if isinstance(last.get("content"), str) and not last.get("tool_calls") else last
    return {
        "id": _digest(row) if row.get("id") is None else row["id"],
        "input": {"messages": asked, **{name: row[name] for name in _REQUEST if row.get(name) is not None}},
        "answer": answer,
        "split": row.get("split"),
        "meta": dict(row),
    }

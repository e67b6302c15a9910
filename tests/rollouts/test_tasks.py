"""Task files of every kind, and the errors for invalid ones."""

import json
import subprocess
import sys
import tracemalloc
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainspan_rollouts.task_file import Task, count_tasks, read_tasks
from trainspan_schemas.errors import TaskFileError

GOOD = '{"id": 1, "input": {"q": "é"}, "answer": [4], "split": "val", "meta": {"k": 1}}\n\n{"id": "b", "input": "x"}\n'


def test_json_lines_keep_values_and_skip_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(GOOD)
    assert list(read_tasks(path)) == [Task("1", {"q": "é"}, [4], "val", {"k": 1}), Task("b", "x")]
    assert Task("1", {"q": 1}, "secret", None, "secret").for_agent() == {"id": "1", "input": {"q": 1}}


def test_half_characters_of_a_task_are_escaped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"id": "a\\ud83d", "input": {"q": ["\\udc80"], "whole": "\\ud83d\\ude00"}}\n{"id": "b", "input": "x"}\n'
    )
    tasks = [Task(r"a\ud83d", {"q": [r"\udc80"], "whole": "😀"}), Task("b", "x")]
    assert (count_tasks(path), list(read_tasks(path))) == (2, tasks)
    assert [record.getMessage() for record in caplog.records] == [
        f"event=half_characters source={path}:1; text that is not valid Unicode is escaped"
    ]


def test_a_split_skips_only_the_tasks_of_the_other_one(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(GOOD)
    assert [task.id for task in read_tasks(path, "train")] == ["b"]
    assert [task.id for task in read_tasks(path, "val")] == ["1", "b"]
    assert [count_tasks(path), count_tasks(path, "train"), count_tasks(path, "val")] == [2, 1, 2]


def test_rows_of_a_fine_tuning_file_are_tasks(tmp_path: Path) -> None:
    path = tmp_path / "rft.jsonl"
    asked = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
    earlier = {"role": "assistant", "content": "?", "weight": 0}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = [
        {"messages": asked, "reference_answer": {"n": 4}, "difficulty": 1, "tools": [{"type": "function"}]},
        {"messages": [*asked, earlier, asked[1], {"role": "assistant", "content": "4"}], "id": 7, "split": "val"},
        {"messages": [*asked, called]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = read_tasks(path)
    assert first.for_agent() == {"id": first.id, "input": {"messages": asked, "tools": [{"type": "function"}]}}
    assert (first.answer, first.meta, len(first.id)) == ({"n": 4}, rows[0], 16)
    assert (second.id, second.split, second.answer) == ("7", "val", "4")
    assert second.input == {"messages": [*asked, {"role": "assistant", "content": "?"}, asked[1]]}
    assert third.answer == called
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(dict(reversed(rows[0].items()))) + "\n")
    with pytest.raises(TaskFileError, match=rf"rft.jsonl:2: the id '{first.id}' occurs a second time"):
        count_tasks(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "has no question"),
        ({"messages": "2+2?"}, "is not a list of messages"),
        ({"messages": [{"content": "2+2?"}]}, "is not a list of messages"),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "has no question"),
        ({"messages": [{"role": "system", "content": "4"}]}, "has no question"),
        ({"messages": [{"role": "user", "content": "x"}], "split": "test"}, "split 'test' is neither"),
        ({"messages": [{"role": "user", "content": "x"}], "input": "y"}, "unknown field 'messages'"),
    ],
)
def test_a_row_without_a_question_is_refused_by_its_line(tmp_path: Path, row: object, message: str) -> None:
    path = tmp_path / "rft.jsonl"
    path.write_text("\n" + json.dumps(row))
    with pytest.raises(TaskFileError, match="rft.jsonl:2: .*" + message):
        count_tasks(path)


def test_csv_rows_may_span_lines_and_empty_cells_are_absent(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    path.write_text('id,input,answer,split\n1,"two\nlines",4,\n2,x,,val\n', encoding="utf-8-sig")
    assert list(read_tasks(path)) == [Task("1", "two\nlines", "4"), Task("2", "x", None, "val")]


def test_parquet_rows_are_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.table({"id": [1, 2], "input": ["a", "b"], "answer": [None, "z"]}), path)
    assert list(read_tasks(path)) == [Task("1", "a"), Task("2", "b", "z")]


def test_parquet_rows_of_fine_tuning_may_have_times(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "2+2?"}], "at": datetime(2026, 1, day)} for day in (1, 2)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rft.parquet")  # type: ignore[no-untyped-call]
    first, second = read_tasks(tmp_path / "rft.parquet")
    assert first.id != second.id


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tasks.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskFileError, match=r"needs pyarrow: pip install"):
        list(read_tasks(path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"id": "a", "input": 1}\n{"id": "b"}\n', r"t\.jsonl:2: task 'b' has no field 'input'"),
        ("t.jsonl", '{"id": "a", "input": 1}\n\n{"id"\n', r"t\.jsonl:3: not JSON"),
        ("t.jsonl", '{"id": "a", "input": 1}\n{"id": "b", "input": ' + "9" * 5000 + "}\n", r"t\.jsonl:2: not JSON"),
        ("t.jsonl", "\ufffd[1]\n", r"t\.jsonl:1: not JSON"),
        ("t.jsonl", "[1]\n", r"t\.jsonl:1: not an object"),
        ("t.jsonl", '{"input": 1}\n', r"t\.jsonl:1: the field 'id' is missing"),
        ("t.jsonl", '{"id": 1.5, "input": 1}\n', r"t\.jsonl:1: the field 'id' is 1\.5"),
        ("t.jsonl", '{"id": "a", "input": 1, "anwser": 2}\n', r"t\.jsonl:1: unknown field 'anwser'"),
        ("t.jsonl", '{"id": "a", "input": 1, "split": "dev"}\n', r"t\.jsonl:1: split 'dev'"),
        ("t.jsonl", '{"id": "1", "input": 1}\n{"id": 1, "input": 2}\n', r"t\.jsonl:2: the id '1' occurs a second time"),
        (
            "t.jsonl",
            '{"id": "lodash@4.17.21@3", "input": 1}',
            r"t\.jsonl:1: the id 'lodash@4.17.21@3' has the form of a branch's",
        ),
        ("t.jsonl", "\n", r"has no tasks"),
        ("t.csv", "id,input\n1,a\n2\n", r"t\.csv:3: its number of fields is not the header's \(2\)"),
        ("t.csv", 'id,input\n1,"a\n', r"t\.csv:2: not CSV"),
        ("t.parquet", "no parquet", r"t\.parquet: not Parquet"),
        ("t.txt", "", r"t\.txt: a task file must end in \.jsonl"),
    ],
)
def test_an_invalid_task_file_is_reported_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TaskFileError, match=message):
        count_tasks(path)


def test_a_missing_task_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="no task file"):
        list(read_tasks(tmp_path / "none.jsonl"))


def test_tasks_are_read_as_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"id": number, "input": "x"}) + "\n" for number in range(3)) + "broken\n")
    tasks = read_tasks(path)
    assert [next(tasks).id for _ in range(3)] == ["0", "1", "2"]
    with pytest.raises(TaskFileError, match=":4: not JSON"):
        next(tasks)


WRITE_AND_COUNT = """
import json, resource, sys
from pathlib import Path
from trainspan_rollouts.task_file import count_tasks, read_tasks

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak_mib()
path = Path(sys.argv[1])
count = count_tasks(path)
last = None
for last in read_tasks(path):
    pass
print(count, last.id, round(peak_mib() - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit_mib"), [("jsonl", 40), ("csv", 40), ("parquet", 200)])
def test_a_million_tasks_are_checked_and_read_in_little_memory(tmp_path: Path, kind: str, limit_mib: int) -> None:
    path = tmp_path / f"tasks.{kind}"
    ids = [f"task-{number}" for number in range(1_000_000)]
    if kind == "parquet":  # pyarrow itself takes most of its limit
        pq.write_table(pa.table({"id": ids, "input": ["a question of some length"] * len(ids)}), path)
    else:
        head, row = ("id,input\n", "{},what is it\n") if kind == "csv" else ("", '{{"id": "{}", "input": "what"}}\n')
        path.write_text(head + "".join(row.format(id_) for id_ in ids))
    done = subprocess.run(
        [sys.executable, "-c", WRITE_AND_COUNT, str(path)], capture_output=True, text=True, timeout=250, check=True
    )
    count, last, grown_mib = done.stdout.split()
    assert (count, last) == ("1000000", "task-999999")
    assert int(grown_mib) < limit_mib


def test_memory_does_not_grow_with_the_number_of_tasks(tmp_path: Path) -> None:
    peaks = []
    for count in (2_000, 20_000):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(f'{{"id": {number}, "input": "x"}}\n' for number in range(count)))
        tracemalloc.start()
        assert count_tasks(path) == count
        assert sum(1 for _ in read_tasks(path)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 100_000  # bytes; 18,000 more ids alone would take ten times that


def test_a_repeated_id_is_found_among_many(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    lines = [f'{{"id": {number}, "input": "x"}}' for number in range(50_000)]
    path.write_text("\n".join([*lines, lines[49_998]]) + "\n")
    with pytest.raises(TaskFileError, match=r":50001: the id '49998' occurs a second time"):
        count_tasks(path)

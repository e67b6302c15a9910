"""Files that break the rules: what is broken costs only itself, and is named with file and line."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.importers.reading import lines, read
from tests.importers.test_backends import (
    LANGFUSE_CALL,
    LANGFUSE_SCORES,
    LANGFUSE_TOOL,
    LANGFUSE_TRACE,
    LANGSMITH_CALL,
    LANGSMITH_FEEDBACK,
    LANGSMITH_ROOT,
    LANGSMITH_TOOL,
    PHOENIX_ANNOTATION,
    PHOENIX_SPAN,
)
from tests.importers.test_openai_chat import EXAMPLE
from tests.importers.test_sessions import ATIF, CLAUDE_CODE, CODEX
from tests.importers.test_traces import CHILD_SPAN, JAEGER
from trainspan_importers.importing import ImportRequest, import_files
from trainspan_importers.source_files import MOST_BYTES
from trainspan_schemas.errors import UsageError

GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def _example(text: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"messages": ' + b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00", "not JSON: "),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not JSON: "),
        (b'{"messages": [NaN, Infinity]}', "a message is no object"),
        (b'{"messages": [{"role": "assistant", "content": "a", "tool_calls": 7, "name": {}}], "input": 9e999}', ""),
        (b"[1, 2]", "no object"),
        (b"7", "no object"),
        (b'{"messages": [{"role": "user", "content": ' + b"9" * 5000 + b"}]}", "not JSON: "),
        (b'{"messages": "' + b"x" * MOST_BYTES + b'"}', "longer than 64 MiB"),
    ],
    ids=["depth", "bytes", "encoding", "no numbers", "wrong types", "list", "number", "digits", "size"],
)
def test_a_line_that_is_no_record_costs_only_itself(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_bytes(b"\n".join([_example("first").encode(), line, _example("last").encode()]))
    found = read(path)
    assert found.account.left_out["broken"] == (1 if why else 0)
    assert found.account.rollouts == (2 if why else 3)
    if why:
        assert found.account.examples[0].startswith(f"{path}:2: {why}")


def test_half_characters_and_a_byte_order_mark_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + _example("\ud83d").encode() + b"\r\n\r\n" + _example("ü\U0001f600").encode())
    found = read(path)
    texts = [call.messages("input")[0]["parts"][0]["content"] for call in found.calls]
    assert texts == ["\ufffd", "ü\U0001f600"]
    assert found.account.left_out == {}


def test_a_document_that_ends_in_the_middle_keeps_what_came_before(tmp_path: Path) -> None:
    text = json.dumps([GOOD, {**GOOD, "n": 1}, {**GOOD, "n": 2}], indent=1)
    path = tmp_path / "chat.json"
    path.write_text(text[: text.index('"n": 2')])
    found = read(path)
    assert found.account.rollouts == 2
    assert found.account.left_out == {"broken": 1}
    assert "the rest of the file is left out" in found.account.examples[0]


def test_a_document_is_read_piece_by_piece_with_its_lines(tmp_path: Path) -> None:
    """Elements larger and smaller than a piece of a mebibyte, so that pieces end anywhere."""
    examples = [json.loads(_example("é" * size)) for size in (1, 700_000, 3_000_000, 5)]
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([*examples, 7], indent=1, ensure_ascii=False), encoding="utf-8")
    found = read(path)
    texts = [call.messages("input")[0]["parts"][0]["content"] for call in found.calls]
    assert [len(text) for text in texts] == [1, 700_000, 3_000_000, 5]
    last_line = len(path.read_text().splitlines()) - 1
    assert found.account.examples == [f"{path}:{last_line}: no object"]


@pytest.mark.parametrize("name", ["cut.gz", "frames"])
def test_a_file_that_cannot_be_unpacked_further_keeps_what_came_before(tmp_path: Path, name: str) -> None:
    text = "".join(_example(os.urandom(2000).hex()) + "\n" for _ in range(50)).encode()
    path = tmp_path / name
    if name == "frames":
        body = json.dumps({"resourceSpans": []}).encode()
        path.write_bytes(len(body).to_bytes(4, "big") + body + (2**31).to_bytes(4, "big") + b"{")
    else:
        path.write_bytes(gzip.compress(text)[:-5000])
    found = read(path)
    assert found.account.left_out["broken"] in (1, 2)  # also the line in which the text ends
    assert found.account.records > 1
    assert str(path) in found.account.examples[0]


def test_a_file_of_no_known_format_is_refused_and_one_in_a_folder_is_named(tmp_path: Path) -> None:
    other = lines(tmp_path / "other.jsonl", {"x": 1})
    with pytest.raises(UsageError, match=r"other.jsonl: none of its first records is of a known format"):
        read(other)
    lines(tmp_path / "chat.jsonl", GOOD)
    found = import_files(ImportRequest([tmp_path]), lambda _item: None)
    assert (found.accounts["openai"].rollouts, found.unknown) == (1, [other])
    with pytest.raises(UsageError, match="no such file or folder"):
        read(tmp_path / "missing")
    with pytest.raises(UsageError, match="no format 'x': use otlp, tempo"):
        read(other, format="x")


def test_a_named_format_is_used_for_all_files(tmp_path: Path) -> None:
    found = read(lines(tmp_path / "other.jsonl", {"x": 1}, GOOD), format="openai")
    assert (found.account.rollouts, found.account.left_out) == (1, {"broken": 1})


def _replaced(value: Any, replacement: Any) -> Iterator[Any]:
    """The value with one of its parts replaced, for each part."""
    yield replacement
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(members):
        for changed in _replaced(item, replacement):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = changed
            yield copy


SOURCES: dict[str, tuple[Any, ...]] = {
    "openai": (EXAMPLE,),
    "langfuse": (LANGFUSE_TRACE, LANGFUSE_CALL, LANGFUSE_TOOL, *LANGFUSE_SCORES[:2]),
    "langsmith": (LANGSMITH_ROOT, LANGSMITH_CALL, LANGSMITH_TOOL, LANGSMITH_FEEDBACK),
    "phoenix": (PHOENIX_SPAN, PHOENIX_ANNOTATION),
    "claude_code": CLAUDE_CODE,
    "codex": CODEX,
    "atif": (ATIF,),
    "jaeger": (JAEGER,),
    "otlp": ({"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "s"}, "spans": [CHILD_SPAN]}]}]},),
}


@pytest.mark.ci
@pytest.mark.parametrize("replacement", [None, 7, {"a": ["x"]}], ids=repr)
@pytest.mark.parametrize("name", SOURCES)
def test_a_record_with_any_part_of_another_type_stops_nothing(tmp_path: Path, name: str, replacement: Any) -> None:
    """The others are read; what the broken one becomes can be sent."""
    records, path = SOURCES[name], tmp_path / "file.jsonl"
    whole = len(read(lines(path, *records), format=name).spans)
    for number, record in enumerate(records):
        for changed in _replaced(record, replacement):
            found = read(lines(path, *records[:number], changed, *records[number + 1 :]), format=name)
            assert found.account.records == len(records)
            assert len(found.spans) <= 2 * whole
            for span in found.spans:
                assert (len(span.trace), len(span.id)) == (32, 16)
                assert span.item.message.SerializeToString()


@pytest.mark.parametrize(
    ("name", "item", "broken"),
    [
        ("langfuse", LANGFUSE_CALL, {"startTime": None}),
        ("langfuse", LANGFUSE_CALL, {"startTime": "0001-01-01T00:00:00Z"}),
        ("langsmith", LANGSMITH_ROOT, {"start_time": None}),
        ("phoenix", PHOENIX_SPAN, {"start_time": None}),
    ],
)
def test_a_broken_item_of_a_page_in_one_line_costs_only_itself(
    tmp_path: Path, name: str, item: dict[str, Any], broken: dict[str, Any]
) -> None:
    """Each is a trace of its own; a root that Langfuse's observations lack is made for those that are there."""
    items = []
    for number in range(10):
        trace = f"{number:032x}"
        own = {
            "langfuse": {"id": f"g{number}", "traceId": f"t{number}"},
            "langsmith": {"id": trace, "trace_id": trace},
            "phoenix": {"context": {"trace_id": f"{number + 1:032x}", "span_id": f"{number + 1:016x}"}},
        }[name]
        items.append({**item, **own, **(broken if number == 3 else {})})
    page = tmp_path / "page.json"
    page.write_text(json.dumps({"data": items}))
    found = read(page)
    assert (found.account.rollouts, found.account.left_out["broken"]) == (9, 1)
    assert len(found.spans) == (18 if name == "langfuse" else 9)


@pytest.mark.parametrize(
    "broken",
    [{"parentUuid": 7}, {"message": {"role": "assistant", "id": {"a": 1}}}, {"timestamp": "9999-12-31T23:59:59Z"}],
)
def test_a_malformed_entry_of_a_transcript_costs_only_itself(tmp_path: Path, broken: dict[str, Any]) -> None:
    whole = read(lines(tmp_path / "whole.jsonl", *CLAUDE_CODE))
    other = {**CLAUDE_CODE[-1], "uuid": "a6", **broken}
    found = read(lines(tmp_path / "session.jsonl", *CLAUDE_CODE, other))
    assert found.account.left_out["broken"] == 1
    assert (len(found.spans), found.account.rollouts) == (len(whole.spans), 1)


def test_a_compressed_file_of_spans_that_is_cut_keeps_what_came_before(tmp_path: Path) -> None:
    """Its spans may name their rollouts, so it is searched for them first."""
    span = {**CHILD_SPAN, "name": ""}
    text = [
        json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{**span, "name": os.urandom(900).hex()}]}]}]})
        for _ in range(50)
    ]
    path = tmp_path / "spans.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(text).encode())[:-5000])
    found = read(path)
    assert len(found.spans) > 20
    assert found.account.left_out["broken"] in (1, 2)


def test_a_malformed_annotation_costs_only_itself(tmp_path: Path) -> None:
    notes = [PHOENIX_ANNOTATION, {**PHOENIX_ANNOTATION, "id": "b", "updated_at": "never"}]
    found = read(lines(tmp_path / "notes.jsonl", *notes), lines(tmp_path / "spans.jsonl", PHOENIX_SPAN))
    assert (len(found.spans), found.account.evaluations, found.account.left_out) == (1, 1, {"broken": 1})


def test_langsmith_traces_without_their_root_are_counted(tmp_path: Path) -> None:
    calls = [{**LANGSMITH_CALL, "id": f"{n:032x}", "trace_id": f"{n + 90:032x}"} for n in range(5)]
    found = read(lines(tmp_path / "calls.jsonl", *calls))
    assert (found.account.rollouts, found.account.left_out["no_root"]) == (0, 5)

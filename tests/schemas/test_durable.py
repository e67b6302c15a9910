"""Lines that are appended to files of records."""

from pathlib import Path

import pytest

from trainspan_schemas.files.durable import append_line


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, "new\n"), ("", "new\n"), ("one\n", "one\nnew\n"), ("one\n{torn", "one\n{torn\nnew\n")],
)
def test_a_line_is_appended_after_a_torn_one_was_ended(tmp_path: Path, before: str | None, after: str) -> None:
    path = tmp_path / "records.jsonl"
    if before is not None:
        path.write_text(before)
    append_line(path, "new")
    append_line(path, "é")
    assert path.read_text() == f"{after}é\n"

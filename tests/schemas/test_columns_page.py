"""docs/columns.md: current, and with a meaning for every column; the Parquet fields carry it too."""

import subprocess
import sys
from pathlib import Path

from tests.support.places import ROOT
from trainspan_processing.dataset.parquet import SCHEMA
from trainspan_schemas.artifacts.dataset import COLUMN_MEANINGS, COLUMNS
from trainspan_schemas.store.views import MEANINGS, VIEWS

TOOL = "tools/write_columns.py"


def test_the_page_of_columns_is_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, TOOL, str(tmp_path / "page.md")], cwd=ROOT, check=True, timeout=60)
    current = (tmp_path / "page.md").read_text() == (ROOT / "docs/columns.md").read_text()
    assert current, f"docs/columns.md is out of date: run `python {TOOL}`"


def test_no_meaning_is_of_a_column_that_is_not_there() -> None:
    assert list(COLUMN_MEANINGS) == list(COLUMNS)
    known = {column for columns in VIEWS.values() for column in columns}
    assert {column for meanings in MEANINGS.values() for column in meanings} == known


def test_a_dataset_says_in_its_files_what_its_columns_hold() -> None:
    assert {field.name: field.metadata[b"description"].decode() for field in SCHEMA} == COLUMN_MEANINGS

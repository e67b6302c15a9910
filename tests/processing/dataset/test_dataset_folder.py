"""A dataset's folder: common readers open it, it appears atomically."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import chain
from trainspan_processing.assembly import parts
from trainspan_processing.dataset.scratch import local_scratch
from trainspan_schemas.artifacts.dataset import COLUMNS, about_dir, dataset_dirs
from trainspan_schemas.errors import DatasetError


def _pair(bench: Bench, names: str, **more: Any) -> None:
    """A group of two rollouts with two calls each; the second earns 2 as a whole and .5 for its first call."""
    first, second = (chain(bench.rollout(name, task=f"t{names}", **more), 2) for name in names)
    second.reward(0.5, on=next(span.span_id for span in second.spans if span.span_id != second.root))
    bench.send(first.reward(0.0), second.reward(2.0))


def _with_datasets(folder: Path, cache: Path) -> list[dict[str, Any]]:
    import datasets

    datasets.disable_progress_bars()
    found = datasets.load_dataset("parquet", data_dir=str(folder), cache_dir=str(cache))
    assert list(found) == ["train"]
    return list(found["train"])


READERS: dict[str, Callable[[Path, Path], list[dict[str, Any]]]] = {
    "pandas": lambda folder, _: pd.read_parquet(folder, dtype_backend="pyarrow").to_dict("records"),
    "pyarrow": lambda folder, _: pq.read_table(folder).to_pylist(),
    "polars": lambda folder, _: pl.read_parquet(folder).to_dicts(),
    "datasets": _with_datasets,
    "duckdb": lambda folder, _: duckdb.sql(f"SELECT * FROM '{folder}/*.parquet'").to_arrow_table().to_pylist(),
}


def test_one_line_of_every_reader_opens_the_folder(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(parts, "CALLS_PER_FILE", 1)
    monkeypatch.setattr("trainspan_processing.read.tokens.CALLS_PER_CHUNK", 1)
    _pair(bench, "ab", round=49)
    built = bench.build(round_=49)
    assert built.path.name == "round-0049"
    assert sorted(path.name for path in built.path.iterdir()) == ["part-00000.parquet", "part-00001.parquet"]
    names = ["rollout_id", "round", "call_index", "reward", "rollout_reward", "return"]
    first = f"{bench.run_id}-a"
    second = f"{bench.run_id}-b"
    expected = [
        (first, 49, 0, None, 0.0, 0.0),
        (first, 49, 1, None, 0.0, 0.0),
        (second, 49, 0, 0.5, 2.5, 2.5),
        (second, 49, 1, None, 2.5, 2.5),
    ]
    prompts = rows(built)["prompt_ids"].to_list()
    for name, read in READERS.items():
        found = read(built.path, tmp_path / "cache")
        assert [*found[0]] == [*COLUMNS], name
        assert [tuple(None if row[key] is pd.NA else row[key] for key in names) for row in found] == expected, name
        assert [list(row["prompt_ids"]) for row in found] == prompts, name


def test_a_command_that_was_killed_while_it_published_leaves_no_dataset_and_is_run_again(bench: Bench) -> None:
    _pair(bench, "ab", round=3)
    built = bench.build(round_=3)
    about = about_dir(built.path)
    before = {path.name: path.read_bytes() for path in about.iterdir()}
    # Killed between the two renames: the dataset's description is there, its rows are not.
    built.path.rename(bench.out / ".round-0003.17")
    assert dataset_dirs(bench.out) == []
    again = bench.build(round_=3)
    assert (again.was_there, again.sha256) == (False, built.sha256)
    assert {path.name: path.read_bytes() for path in about.iterdir()} == before


def test_two_commands_with_one_pid_never_share_their_unfinished_files(tmp_path: Path) -> None:
    """As in two containers, whose processes have the same pids, on one volume."""
    target = tmp_path / "round-0001"
    (tmp_path / ".round-0001.17" / "rows").mkdir(parents=True)  # of a command that was killed
    (tmp_path / ".round-0002.17").mkdir()
    with local_scratch(target) as first:
        assert sorted(path.name for path in tmp_path.iterdir()) == [first.root.name, ".round-0002.17"]
        with first.rows.filling("part-00000.parquet") as path:
            path.write_text("first")
        with local_scratch(target) as second:
            assert second.root != first.root
            with second.rows.filling("part-00000.parquet") as path:
                path.write_text("second")
            first.publish()
            with pytest.raises(DatasetError, match="another command created"):
                second.publish()
    assert (target / "part-00000.parquet").read_text() == "first"
    assert not list(tmp_path.glob(".round-0001*"))


def test_two_commands_cannot_make_the_same_dataset(tmp_path: Path) -> None:
    target = tmp_path / "round-0001"
    with local_scratch(target) as scratch:
        with scratch.rows.filling("part-00000.parquet") as path:
            path.touch()
        target.mkdir()
        with pytest.raises(DatasetError, match="another command created"):
            scratch.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-0001"]

"""Reading dataset folders: verification and its messages."""

import dataclasses
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.dataset_files import LoggedCall, write_dataset
from trainspan_schemas.artifacts.dataset import about_dir, dataset_dirs, manifest_path
from trainspan_schemas.errors import DatasetError
from trainspan_training.data.dataset import open_dataset, read_calls
from trainspan_training.data.sequences import make_sequences

CALL = LoggedCall("rollout", [1, 2, 3], [4, 5], [-0.5, -1.25], advantage=0.75, segment_id=2, temperature=0.7, attempt=1)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads(manifest_path(folder).read_text())
    change(manifest)
    manifest_path(folder).write_text(json.dumps(manifest))


def test_a_row_comes_back_as_it_was_written(tmp_path: Path) -> None:
    longer = dataclasses.replace(CALL, prompt_ids=[7] * 10, policy_version=3)
    dataset = open_dataset(write_dataset(tmp_path, [CALL, longer], round_=4))
    (first, second), _ = read_calls(dataset)
    assert (dataset.round, dataset.rows, dataset.rollouts) == (4, 2, 1)
    assert (first.rollout, first.segment, first.policy_version) == ("rollout/1", 2, 0)
    assert (first.prompt_ids.tolist(), first.completion_ids.tolist()) == ([1, 2, 3], [4, 5])
    assert first.logprobs.tolist() == [-0.5, -1.25]
    assert (first.advantage, first.temperature) == (0.75, 0.7)
    assert (second.prompt_ids.tolist(), second.policy_version) == ([7] * 10, 3)


def test_datasets_are_found_by_round_and_unfinished_ones_are_not(tmp_path: Path) -> None:
    for round_ in (10, 9, 12345):
        write_dataset(tmp_path, [CALL], round_=round_)
    (tmp_path / ".tmp-round-0011").mkdir()
    (tmp_path / "round-0012.tmp").mkdir()
    assert [path.name for path in dataset_dirs(tmp_path)] == ["round-0009", "round-0010", "round-12345"]
    assert dataset_dirs(tmp_path / "nowhere") == []


def test_the_identity_is_the_hash_of_the_manifest(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, [CALL])
    before = open_dataset(folder).sha256
    edit_manifest(folder, lambda manifest: manifest.update(note="another"))
    assert len(before) == 64
    assert open_dataset(folder).sha256 != before


def test_groups_without_contrast_are_read_if_the_manifest_counts_them(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, [CALL])
    assert (open_dataset(folder).groups, open_dataset(folder).zero_spread_groups) == (None, None)
    edit_manifest(folder, lambda manifest: manifest.update(groups_spread={"seen": 5, "singleton": 1, "zero_spread": 2}))
    assert (open_dataset(folder).groups, open_dataset(folder).zero_spread_groups) == (5, 2)


def test_a_file_that_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, [CALL])
    part = next(folder.glob("*.parquet"))
    part.write_bytes(part.read_bytes() + b" ")
    with pytest.raises(DatasetError, match=r"part-0000.parquet has sha256 .* build the dataset again"):
        read_calls(open_dataset(folder))


def test_a_count_that_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, [CALL])
    edit_manifest(folder, lambda manifest: manifest.update(rows=2))
    with pytest.raises(DatasetError, match="has 1 rows, but its manifest states 2"):
        read_calls(open_dataset(folder))


def test_a_dataset_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, [CALL])
    edit_manifest(folder, lambda manifest: manifest.update(version=99))
    with pytest.raises(DatasetError, match="dataset version 99"):
        open_dataset(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 4}', '{"version": 4, "round": null}'])
def test_a_malformed_manifest_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_dataset(tmp_path, [CALL], round_=3)
    manifest_path(folder).write_text(text)
    with pytest.raises(DatasetError, match=r"manifest\.json is malformed"):
        open_dataset(folder)


def test_a_dataset_without_what_describes_it_is_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, [CALL], round_=3)
    shutil.rmtree(about_dir(folder))
    with pytest.raises(DatasetError, match=r"cannot read .*round-0003\.about/manifest\.json"):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [-0.5]}, "has 2 completion tokens but 1 log-probabilities"),
        ({"completion_ids": [], "logprobs": []}, "has no prompt or no completion token"),
        ({"prompt_ids": []}, "has no prompt or no completion token"),
        ({"logprobs": [-0.5, float("nan")]}, "not finite"),
        ({"advantage": float("inf")}, "not finite"),
        ({"temperature": 0.0}, "was sampled at temperature 0.0"),
        ({"advantage": None}, "has a row without advantage"),
        ({"logprobs": None}, "has a row without logprobs"),
    ],
)
def test_a_row_that_cannot_be_trained_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_dataset(tmp_path, [CALL, dataclasses.replace(CALL, call_index=1, **change)])
    with pytest.raises(DatasetError, match=message):
        read_calls(open_dataset(folder))


def test_a_null_inside_the_log_probabilities_is_not_finite(tmp_path: Path) -> None:
    broken: Any = [-0.5, None]
    folder = write_dataset(tmp_path, [dataclasses.replace(CALL, logprobs=broken)])
    with pytest.raises(DatasetError, match="not finite"):
        read_calls(open_dataset(folder))


def _long_rollout(name: str, turns: int, added: int, **more: Any) -> list[LoggedCall]:
    """Each turn's prompt is everything before it plus `added` new tokens; 2 tokens are sampled."""
    calls, sequence = [], []
    for turn in range(turns):
        known, sequence = len(sequence), [*sequence, *range(100 * turn, 100 * turn + added)]
        call = LoggedCall(
            name, sequence, [7, turn], [-0.5, -1.0], 1.0, call_index=turn, segment_pos=turn, prefix_len=known
        )
        calls.append(dataclasses.replace(call, **more))
        sequence = [*sequence, 7, turn]
    return calls


def test_of_a_call_that_continues_its_segment_only_what_is_new_is_kept(tmp_path: Path) -> None:
    aside = dataclasses.replace(CALL, rollout_id="r", attempt=0, segment_id=1, call_index=9)
    first, second, third = _long_rollout("r", 3, added=3)
    dataset = open_dataset(write_dataset(tmp_path, [first, second, aside, third, *_long_rollout("s", 2, added=3)]))
    calls, _ = read_calls(dataset)
    assert [(call.prefix_len, call.prompt_ids.tolist()) for call in calls] == [
        (0, [0, 1, 2]),
        (5, [100, 101, 102]),
        (0, [1, 2, 3]),
        (10, [200, 201, 202]),
        (0, [0, 1, 2]),
        (5, [100, 101, 102]),
    ]
    whole, _ = read_calls(dataset, whole=True)
    assert whole[3].prompt_ids.tolist() == third.prompt_ids
    for one, other in zip(make_sequences(calls, merge=True), make_sequences(whole, merge=True), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.positions.tolist() == other.positions.tolist()
    assert len(make_sequences(calls, merge=True)[0].tokens) == 15


def test_after_a_call_that_was_left_out_as_stale_its_tokens_are_kept_with_the_next_one(tmp_path: Path) -> None:
    logged = _long_rollout("r", 3, added=3, policy_version=5)
    logged[1] = dataclasses.replace(logged[1], policy_version=2)
    calls, left_out = read_calls(open_dataset(write_dataset(tmp_path, logged)), is_stale=lambda version: version < 3)
    assert left_out == 1
    assert [(call.prefix_len, call.prompt_ids.tolist()) for call in calls] == [
        (0, [0, 1, 2]),
        (5, [100, 101, 102, 7, 1, 200, 201, 202]),
    ]
    [row] = make_sequences(calls, merge=True)
    assert row.tokens.tolist() == [*logged[2].prompt_ids, 7, 2]


def test_a_prompt_that_departs_from_its_segment_stays_whole_and_is_refused_as_a_row(tmp_path: Path) -> None:
    first, second = _long_rollout("r", 2, added=3)
    changed = dataclasses.replace(second, prompt_ids=[9, *second.prompt_ids[1:]])
    calls, _ = read_calls(open_dataset(write_dataset(tmp_path, [first, changed])))
    assert calls[1].prefix_len == 0
    with pytest.raises(DatasetError, match="call 1 of rollout r/0 does not continue its segment 0 token by token"):
        make_sequences(calls, merge=True)


def test_memory_follows_the_new_tokens_and_not_the_prompts(tmp_path: Path) -> None:
    """8 rollouts of 50 turns: 82,400 tokens in total, or 2,101,200 as whole prompts with their answers."""
    logged = [call for number in range(8) for call in _long_rollout(f"r{number}", 50, added=204)]
    assert sum(len(call.prompt_ids) + 2 for call in logged) == 2_101_200
    dataset = open_dataset(write_dataset(tmp_path, logged))
    del logged
    default, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counted)
    tracemalloc.start()
    try:
        calls, _ = read_calls(dataset)
        held, peak = (both + counted.bytes_allocated() for both in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(default)
    assert sum(len(call.prompt_ids) + 2 for call in calls) == 82_400
    whole = 4 * 2_101_200
    assert held < whole / 4
    assert peak + counted.max_memory() < whole

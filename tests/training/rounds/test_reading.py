"""What each process of a team reads of a dataset; their micro-batches equal those of one process."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support.dataset_files import LoggedCall, write_dataset
from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import DatasetError
from trainspan_schemas.telemetry.constraints import Constraint
from trainspan_training.checkpoints.lineage import Lineage
from trainspan_training.constraints.replay import Replayer
from trainspan_training.data.dataset import DatasetFolder, open_dataset, read_calls
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.loss_weights import find_rule
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.data.sequences import ChatTurns
from trainspan_training.data.token_limits import FREE
from trainspan_training.devices.team import Team
from trainspan_training.model.starting_policy import Policy
from trainspan_training.rounds.reading import Outline, RoundReading


class Config:
    vocab_size = 1000
    max_position_embeddings = 512


class Following(Team):
    """The second of two processes, which receives what the first one shared."""

    def __init__(self, shared: list[Any]) -> None:
        super().__init__(1, 2)
        self._shared = shared

    def share(self, make: Callable[[], Any]) -> Any:
        return self._shared.pop(0)

    def gather(self, values: Any) -> list[Any]:
        return [values]


class Leading(Team):
    """The first of two processes."""

    def __init__(self, shared: list[Any]) -> None:
        super().__init__(0, 2)
        self._shared = shared

    def share(self, make: Callable[[], Any]) -> Any:
        self._shared.append(make())
        return self._shared[-1]

    def gather(self, values: Any) -> list[Any]:
        return [values]


def logged(rollouts: int = 6, turns: int = 3) -> list[LoggedCall]:
    """Tokens identify their rollouts, and 5, 5, 5 opens an answer; every second rollout is from an older policy."""
    calls = []
    for rollout in range(rollouts):
        tokens: list[int] = []
        for turn in range(turns):
            known = len(tokens)
            tokens = [*tokens, 10 + rollout, *[5] * 3]
            call = LoggedCall(f"r{rollout}", tokens, [100 + rollout, turn], [-0.5, -1.0], 1.0)
            place = {"call_index": turn, "segment_pos": turn, "prefix_len": known, "policy_version": rollout % 2}
            calls.append(dataclasses.replace(call, **place))
            tokens = [*tokens, 100 + rollout, turn]
    return calls


def in_files(folder: Path, rows: int, group: int) -> DatasetFolder:
    """The dataset in files of `rows` rows, with row groups of `group`."""
    manifest = json.loads(manifest_path(folder).read_text())
    (part,) = folder.glob("*.parquet")
    table, files = pq.read_table(part), []
    part.unlink()
    for start in range(0, table.num_rows, rows):
        path = folder / f"part-{start:04d}.parquet"
        pq.write_table(table.slice(start, rows), path, row_group_size=group)
        files.append({"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    manifest_path(folder).write_text(json.dumps({**manifest, "files": files}))
    return open_dataset(folder)


def test_only_files_and_row_groups_that_hold_what_is_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = in_files(write_dataset(tmp_path, logged()), rows=9, group=3)
    whole, _ = read_calls(dataset)
    assert [call.number for call in whole] == list(range(18))
    other = dataset.path / "part-0009.parquet"
    pq.write_table(pq.read_table(other).slice(0, 9), other, compression="none")
    read: list[list[int]] = []
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda self, *args, **named: read.append(named["row_groups"]) or batches(self, *args, **named),
    )
    calls, _ = read_calls(dataset, only=frozenset([3, 4, 5]))
    assert read == [[1]]
    assert [call.number for call in calls] == [3, 4, 5]
    for mine, all_of_them in zip(calls, whole[3:6], strict=True):
        assert mine.prompt_ids.tolist() == all_of_them.prompt_ids.tolist()
        assert mine.prefix_len == all_of_them.prefix_len
    with pytest.raises(DatasetError, match=r"part-0009.parquet has sha256"):
        read_calls(dataset, only=frozenset([3, 9]))


def taken(
    dataset: DatasetFolder, settings: TrainSettings, layout: BatchLayout, team: Team, vocabulary: int = 1000
) -> tuple[list[list[MicroBatch]], Outline]:
    """The micro-batches of each of this process's steps, and its outline of the round."""
    replayer = Replayer(vocabulary, bytes)  # no grammar is compiled
    policy, turns = (
        Policy(Path(), None, "base", 1, Path()),
        ChatTurns(np.array([5, 5, 5], dtype=np.int32), frozenset({0, 1})),
    )
    reading = RoundReading(dataset, policy, settings, team, replayer, Lineage({}), turns)
    reading.replay()
    reading.read()
    outline = reading.plan(Config(), layout, find_rule(settings))
    return [list(step.micro_batches) for step in reading.build_steps(outline)], outline


@pytest.mark.parametrize("mode", ["padded", "packed", "tree"])
@pytest.mark.parametrize("oldest", [None, 0])
def test_two_processes_have_the_micro_batches_of_one_and_each_reads_its_own_rows(
    tmp_path: Path, mode: str, oldest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = in_files(write_dataset(tmp_path, logged()), rows=9, group=3)
    settings = TrainSettings(forward=mode, max_staleness=oldest, rollouts_per_step=3, policy_url="none")
    layout = BatchLayout(mode, 40, pair=0.0, blocks=False, processes=2)
    asked: list[int] = []

    def watched(*args: Any, only: frozenset[int] | None = None, **named: Any) -> Any:
        asked.append(-1 if only is None else len(only))
        return read_calls(*args, only=only, **named)

    monkeypatch.setattr("trainspan_training.rounds.reading.read_calls", watched)

    whole, _ = taken(dataset, settings, layout, Team())
    shared: list[Any] = []
    (first, _), (second, _) = (taken(dataset, settings, layout, team(shared)) for team in (Leading, Following))
    trained = sum(len(batch.targets) for step in whole for batch in step)
    assert trained == (36 if oldest is None else 18)
    assert asked[:2] == [-1, -1]
    assert 0 < asked[2] < trained / 2
    for step, one, two in zip(whole, first, second, strict=True):
        together = [batch for pair in zip(one, two, strict=True) for batch in pair]
        for expected, found in zip(step, together, strict=False):
            for name in ("tokens", "predicting", "targets", "calls", "sampled", "advantages", "weights"):
                assert np.array_equal(getattr(expected, name), getattr(found, name)), name
            assert expected.observations is not None
            assert found.observations is not None
            assert set(expected.observations.targets.tolist()) <= set(range(10, 16))
            for name in ("predicting", "targets", "weights"):
                assert np.array_equal(getattr(expected.observations, name), getattr(found.observations, name)), name
        assert all(len(batch.targets) == 0 for batch in together[len(step) :])


def constrained() -> list[LoggedCall]:
    """The same calls: those of a rollout, except the last, under one set of allowed tokens; one cannot be replayed."""
    calls = []
    for call in logged():
        rollout = int(call.rollout_id[1:])
        limit = Constraint(allowed_ids=(*range(3), 100 + rollout, 200 + rollout))
        if (rollout, call.call_index) == (3, 1):
            limit = Constraint(others=("beam_search",))
        free = call.call_index == 2
        calls.append(dataclasses.replace(call, constraint=None if free else limit.to_json()))
    return calls


def masks(batch: MicroBatch) -> list[list[int]]:
    """The mask of each trained token; empty for an unconstrained token."""
    if batch.limits is None:
        return [[]] * len(batch.targets)
    table = batch.limits.table
    return [[] if index == FREE else table.masks([index])[0].tolist() for index in batch.limits.index.tolist()]


@pytest.mark.parametrize("mode", ["padded", "packed", "tree"])
def test_each_process_replays_its_own_calls_and_what_the_first_one_drops_is_trained_by_none(
    tmp_path: Path, mode: str
) -> None:
    dataset = in_files(write_dataset(tmp_path, constrained()), rows=9, group=3)
    settings = TrainSettings(forward=mode, rollouts_per_step=3, policy_url="none")
    layout = BatchLayout(mode, 40, pair=0.0, blocks=False, processes=2)
    whole, outline = taken(dataset, settings, layout, Team())
    assert (outline.calls, outline.constrained, outline.unreplayed) == (17, 11, {"constrained:beam_search": 1})
    shared: list[Any] = []
    (first, _), (second, _) = (taken(dataset, settings, layout, team(shared)) for team in (Leading, Following))
    numbers = set()
    for step, one, two in zip(whole, first, second, strict=True):
        together = [batch for pair in zip(one, two, strict=True) for batch in pair]
        for expected, found in zip(step, together, strict=False):
            assert masks(expected) == masks(found)
            for number, target, mask in zip(found.calls.tolist(), found.targets.tolist(), masks(found), strict=True):
                numbers.add(number)
                assert bool(mask) == (number % 3 != 2)
                assert not mask or mask[target // 32] >> target % 32 & 1
    assert numbers == set(range(18)) - {10}


def test_a_process_that_cannot_replay_what_the_first_one_can_says_so(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path, constrained()))
    settings, shared = TrainSettings(rollouts_per_step=64, policy_url="none"), list[Any]()
    layout = BatchLayout("packed", 40, pair=0.0, blocks=False, processes=2)
    taken(dataset, settings, layout, Leading(shared))
    with pytest.raises(
        DatasetError, match=r"that the first process can replay but this one cannot \(constrained:other_vocabulary\)"
    ):
        taken(dataset, settings, layout, Following(shared), vocabulary=100)

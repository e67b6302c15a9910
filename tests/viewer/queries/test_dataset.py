"""Groups and filters of a dataset, worked by hand."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from tests.viewer.support.world import RUN, World
from trainspan_processing.dataset.ledger import LEDGER, ledger_path
from trainspan_schemas.artifacts.dataset import about_dir, manifest_path
from trainspan_schemas.config.settings import Settings
from trainspan_viewer.html.document import served
from trainspan_viewer.pages.dataset import render_dataset
from trainspan_viewer.queries.datasets import members
from trainspan_viewer.queries.datasets.dataset import DatasetModel, load_dataset
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import NotFoundError, ViewerPaths
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader


@pytest.fixture(scope="session")
def sources(world: World) -> Sources:
    places = ViewerPaths(world.home / "runs", world.home / "dataset")
    return Sources(places, StoreReader(world.store), Settings())


def ask(sources: Sources, world: World, **query: str) -> DatasetModel:
    given: Mapping[str, list[str]] = {name: [value] for name, value in query.items()}
    return load_dataset(sources, Params("/x", {"dataset": world.dataset}, given))


def test_rollouts_without_a_dot_are_counted(sources: Sources, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert " more</span>" not in served(render_dataset(ask(sources, world)))
    monkeypatch.setattr(members, "_MOST_DOTS", 3)
    assert " and 1 more</span>" in served(render_dataset(ask(sources, world)))


def test_groups_come_by_spread_with_their_rewards(sources: Sources, world: World) -> None:
    mixed, hostile, equal = ask(sources, world).groups
    assert (mixed.task_id, mixed.n, mixed.mean, mixed.spread) == ("mixed", 4, 0.5, 0.5)
    assert [member.reward for member in mixed.members] == [0.0, 0.0, 1.0, 1.0]
    assert (hostile.mean, hostile.spread) == (0.5, 0.25)
    assert (equal.task_id, equal.spread, equal.kept, equal.reasons) == ("equal", 0.0, 0, ["zero_spread_group"])
    assert mixed.kept == 8


def test_a_group_has_the_id_that_its_rows_have(sources: Sources, world: World) -> None:
    place = sources.paths.dataset(world.dataset)
    import polars as pl

    rows = pl.read_parquet(place.path / "*.parquet").filter(pl.col("task_id") == "mixed")
    assert rows["group_id"].unique().to_list() == [ask(sources, world).groups[0].group_id]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"least_reward": "0.5"}, ["view-e0", "view-e1", "view-h1", "view-m2", "view-m3"]),
        ({"least_reward": "0.5", "most_reward": "0.9"}, ["view-h1"]),
        ({"reason": "kept", "most_reward": "0"}, ["view-m0", "view-m1"]),
        ({"reason": "zero_spread_group"}, ["view-e0", "view-e1"]),
        ({"text": "equal"}, ["view-e0", "view-e1"]),
        ({"text": "view-m1"}, ["view-m1"]),
        ({"status": "timeout"}, []),
        ({"status": "ok", "text": "mixed"}, ["view-m0", "view-m1", "view-m2", "view-m3"]),
        ({"finish": "stop", "most_tokens": "3"}, ["view-h0", "view-h1"]),
        ({"least_tokens": "10"}, ["view-m0", "view-m1", "view-m2", "view-m3"]),
        ({"agent": "nobody"}, []),
    ],
)
def test_filters_leave_what_they_say(sources: Sources, world: World, query: dict[str, str], found: list[str]) -> None:
    model = ask(sources, world, view="rollouts", **query)
    assert sorted(member.rollout_id for member in model.rollouts) == found
    assert model.part.total == len(found)


@pytest.fixture
def altered(sources: Sources, world: World, tmp_path: Path) -> Callable[..., DatasetModel]:
    """Asks for a copy of the dataset, with more lines in its ledger and other numbers of drops."""

    def make(lines: Sequence[Mapping[str, object]] = (), dropped: Mapping[str, int] | None = None, **query: str) -> Any:
        whole = sources.paths.dataset(world.dataset).path
        copy = tmp_path / whole.name
        shutil.copytree(whole, copy, dirs_exist_ok=True)
        shutil.copytree(about_dir(whole), about_dir(copy), dirs_exist_ok=True)
        with ledger_path(copy).open("a") as file:
            file.writelines(json.dumps({**dict.fromkeys(LEDGER), "attempt": 0, **line}) + "\n" for line in lines)
        manifest = json.loads(manifest_path(copy).read_text())
        manifest_path(copy).write_text(json.dumps({**manifest, "dropped": {**manifest["dropped"], **(dropped or {})}}))
        given = {name: [value] for name, value in query.items()}
        places = ViewerPaths(tmp_path / "runs", tmp_path)
        return load_dataset(Sources(places, sources.store, Settings()), Params("/x", {"dataset": copy.name}, given))

    return make


Altered = Callable[..., DatasetModel]
LOST = {"rollout_id": "lost", "run_id": RUN, "round": 1, "task_id": "mixed", "calls": 3, "kept": 0, "rewards": 0}


def test_calls_without_a_rollout_are_no_rollout(altered: Altered) -> None:
    model = altered([{**LOST, "rollout_id": "trace:00ff", "reason": "no_rollout"}], view="rollouts")
    assert model.part.total == 8


def test_figures_of_a_group_are_those_of_all_its_rollouts(sources: Sources, world: World) -> None:
    [mixed, *_] = ask(sources, world, least_reward="0.9", text="mixed").groups
    assert (mixed.n, mixed.mean, mixed.spread, len(mixed.members)) == (4, 0.5, 0.5, 4)


def test_a_status_is_that_of_the_attempt_and_a_missing_one_is_said(altered: Altered) -> None:
    again = {**LOST, "rollout_id": "view-m0", "attempt": 1, "reward": 0.5}
    model = altered([again, {**LOST, "run_id": None}], view="rollouts", status="ok", text="m")
    assert [(one.rollout_id, one.attempt) for one in model.rollouts if one.rollout_id in ("view-m0", "lost")] == [
        ("view-m0", 0)
    ]
    assert model.notes[0] == "The store does not hold the status of 2 rollouts: they are not shown."


def test_a_reason_leads_to_the_rollouts_that_lost_a_call_for_it_and_to_no_others(altered: Altered) -> None:
    whole = {**LOST, "reason": "error_call", "dropped": '{"error_call": 3}'}
    some = {**LOST, "rollout_id": "some", "kept": 2, "dropped": '{"no_logprobs": 1}'}
    mixed = {**LOST, "rollout_id": "both", "reason": "error_call", "dropped": '{"error_call": 1, "no_logprobs": 2}'}
    without_calls = {**LOST, "rollout_id": "empty", "calls": 0, "reason": "infra_error"}
    for reason, found in (
        ("no_logprobs", ["both", "some"]),
        ("error_call", ["both", "lost"]),
        ("infra_error", ["empty"]),
        ("error", []),
    ):
        model = altered([whole, some, mixed, without_calls], {reason: 4}, view="rollouts", reason=reason)
        assert sorted(one.rollout_id for one in model.rollouts) == found
        shutil.rmtree(model.location.path)
    assert {one.rollout_id: one.dropped for one in altered([mixed], view="rollouts").rollouts}["both"] == {
        "error_call": 1,
        "no_logprobs": 2,
    }


def test_a_status_that_an_agent_chose_is_one_reason_and_damages_no_other(bench: Bench, tmp_path: Path) -> None:
    run = tmp_path / "runs" / bench.run_id
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    evil = ('x": 1, "no_reward', '"no_reward', ', "no_reward', '{"no_reward')
    bench.send(
        *(chain(bench.rollout(f"e{place}", status=text), 1) for place, text in enumerate(evil)),
        chain(bench.rollout("none"), 1),
        *(chain(bench.rollout(name), 1).reward(float(name == "a")) for name in "ab"),
    )
    bench.build(round_=0, out=run / "dataset", min_coverage=0.0)
    store = str(bench.collectors[0].store)
    asked = Sources(ViewerPaths(tmp_path / "runs", tmp_path / "none"), StoreReader(store), Settings())
    for reason, name in (("no_reward", "none"), *((text, f"e{place}") for place, text in enumerate(evil))):
        path = {"dataset": f"{bench.run_id}:round-0000"}
        model = load_dataset(asked, Params("/x", path, {"view": ["rollouts"], "reason": [reason]}))
        assert [one.rollout_id for one in model.rollouts] == [f"{bench.run_id}-{name}"]
        assert model.rollouts[0].dropped == {reason: 1}


def test_a_rollout_is_found_by_agents_and_finish_reasons_also_of_dropped_calls_and_by_kinds(
    bench: Bench, tmp_path: Path
) -> None:
    many = bench.rollout("many")
    for place in range(12):
        many.call(place, [1, 2, place], [3], agent=f"agent {place}, the {place}th")
    bad = bench.rollout("bad", task="other", status="timeout")
    bad.call(0, [1, 2], [3], agent="lost, alone", gen_ai__response__finish_reasons=["length"])
    bench.send(many.reward(1.0), chain(bench.rollout("b"), 1).reward(0.0), bad)
    run = tmp_path / "runs" / bench.run_id
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    bench.build(round_=0, out=run / "dataset")
    store = str(bench.collectors[0].store)
    asked = Sources(ViewerPaths(tmp_path / "runs", tmp_path / "none"), StoreReader(store), Settings())

    def found(**query: str) -> list[str]:
        path = {"dataset": f"{bench.run_id}:round-0000"}
        params = Params("/x", path, {"view": ["rollouts"], **{name: [value] for name, value in query.items()}})
        model = load_dataset(asked, params)
        assert model.notes == []
        assert len(model.agents) == 12 + 1
        return [one.rollout_id.rpartition("-")[2] for one in model.rollouts]

    assert found(agent="agent 11, the 11th") == ["many"]
    assert found(agent="lost, alone") == ["bad"]
    assert found(finish="length") == ["bad"]
    assert found(kind="sub_agent") == ["many"]
    assert sorted(found(kind="main")) == ["b", "many"]


def test_the_difference_of_two_datasets_is_that_of_the_command(sources: Sources, world: World) -> None:
    model = ask(sources, world, view="diff", other="round-0001")
    assert model.difference is not None
    assert ("baseline", "grpo", "rloo") in [(one.what, one.before, one.after) for one in model.difference.settings]
    assert model.difference.advantages.changed == model.difference.rows.both > 0


def test_names_lead_to_nothing_outside(sources: Sources) -> None:
    for name in ("../dataset", "..:round-0001", f"{RUN}:../x", f"{RUN}/..:round-0001", "", "round-0001/..", ":"):
        with pytest.raises(NotFoundError):
            sources.paths.dataset(name)

"""Groups and filters of a dataset, worked by hand."""

from collections.abc import Mapping

import pytest

from tests.viewer.support.world import RUN, World
from trainspan_schemas.settings import Settings
from trainspan_viewer.queries.dataset import DatasetModel, load_dataset
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.places import NotFoundError, Places
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader


@pytest.fixture(scope="session")
def sources(world: World) -> Sources:
    places = Places(world.store, world.home / "runs", world.home / "dataset")
    return Sources(places, StoreReader(world.store), Settings())


def ask(sources: Sources, world: World, **query: str) -> DatasetModel:
    given: Mapping[str, list[str]] = {name: [value] for name, value in query.items()}
    return load_dataset(sources, Params("/x", {"dataset": world.dataset}, given))


def test_groups_come_by_spread_with_their_rewards(sources: Sources, world: World) -> None:
    mixed, hostile, equal = ask(sources, world).groups
    assert (mixed.task_id, mixed.n, mixed.mean, mixed.spread) == ("mixed", 4, 0.5, 0.5)
    assert [member.reward for member in mixed.members] == [0.0, 0.0, 1.0, 1.0]
    assert (hostile.mean, hostile.spread) == (0.5, 0.25)
    assert (equal.task_id, equal.spread, equal.kept, equal.reasons) == ("equal", 0.0, 0, ["zero_spread_group"])
    assert mixed.kept == 8


def test_a_group_has_the_id_that_its_rows_have(sources: Sources, world: World) -> None:
    place = sources.places.dataset(world.dataset)
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
    assert model.n_found == len(found)


def test_the_difference_of_two_datasets_is_that_of_the_command(sources: Sources, world: World) -> None:
    model = ask(sources, world, view="diff", other="round-0001")
    assert model.difference is not None
    assert ("baseline", "grpo", "rloo") in [(one.what, one.before, one.after) for one in model.difference.settings]
    assert model.difference.advantages.changed == model.difference.rows.both > 0


def test_names_lead_to_nothing_outside(sources: Sources) -> None:
    for name in ("../dataset", "..:round-0001", f"{RUN}:../x", f"{RUN}/..:round-0001", "", "round-0001/..", ":"):
        with pytest.raises(NotFoundError):
            sources.places.dataset(name)

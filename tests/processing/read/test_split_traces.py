"""Rollouts in several stores: whole ones in different stores, and parts of one trace."""

import dataclasses
import json

import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain
from trainspan_loop.clients.new_rewards import last_places
from trainspan_processing.assembly.build import BuildRequest, BuiltDataset, build_dataset
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError

PLAIN = {"credit": "identical", "min_coverage": 0.0}


def parts(rollout: TestRollout) -> tuple[TestRollout, TestRollout]:
    """Its own span, and its calls."""
    own = dataclasses.replace(rollout, spans=rollout.spans[:1])
    calls = dataclasses.replace(rollout, spans=rollout.spans[1:])
    own.spans, calls.spans = rollout.spans[:1], rollout.spans[1:]
    return own, calls


def test_rollouts_that_are_whole_in_their_stores_are_not_counted_as_split(bench: Bench) -> None:
    for number in range(4):
        bench.send(chain(bench.rollout(str(number)), 1).reward(number), store=number % 2)
    built = bench.build(stores=(0, 1), round_=0, **PLAIN)
    assert built.manifest["rows"] == 4
    assert built.manifest["split_traces"] == {"traces": 0, "examples": []}


def test_a_trace_in_two_stores_is_counted_and_named_and_its_identified_calls_are_rows(bench: Bench) -> None:
    whole, split = (chain(bench.rollout(name), 2).reward(score) for name, score in (("a", 0.0), ("b", 1.0)))
    bench.send(whole, store=0)
    for store, part in enumerate(parts(split)):
        bench.send(part, store=store)
    built = bench.build(stores=(0, 1), round_=0, **PLAIN)
    assert sorted(rows(built)["rollout_id"]) == [f"{bench.run_id}-{name}" for name in "aabb"]
    stores = [str(collector.store) for collector in bench.collectors[:2]]
    example = {"trace_id": split.trace_id, "stores": stores}
    assert built.manifest["split_traces"] == {"traces": 1, "examples": [example]}


def test_calls_that_name_no_rollout_and_are_in_another_store_are_dropped_with_a_reason(bench: Bench) -> None:
    """Nothing in their store says whose they are: the count of split traces says where to look."""
    rollout = chain(TestRollout(f"{bench.run_id}-a", run=None), 2).reward(1.0)
    for call in rollout.spans[1:]:
        call.attributes = {
            key: value for key, value in call.attributes.items() if not key.startswith("trainspan.rollout")
        }
        call.attributes.pop("trainspan.run.id", None)
    stores = [str(collector.store) for collector in bench.collectors[:2]]
    places = last_places(stores)  # other tests' rollouts are before these
    for store, part in enumerate(parts(rollout)):
        bench.send(part, store=store)
    bench.send(chain(bench.rollout("b"), 1).reward(1.0))
    settings = dataclasses.replace(DatasetSettings(), **PLAIN, baseline="none")
    built = build_dataset(BuildRequest(stores, bench.out, settings, since_seq=places), bench.clock)
    assert built.manifest["split_traces"] == {
        "traces": 1,
        "examples": [{"trace_id": rollout.trace_id, "stores": stores}],
    }
    assert built.manifest["dropped"]["no_rollout"] >= 2  # calls without a rollout count wherever they are


def test_a_place_in_each_store_leaves_out_what_came_before(bench: Bench) -> None:
    def build(since: tuple[int, ...], number: int) -> BuiltDataset:
        request = BuildRequest(
            [str(collector.store) for collector in bench.collectors[:2]],
            bench.out / str(number),
            dataclasses.replace(DatasetSettings(), **PLAIN),
            run_id=bench.run_id,
            since_seq=since,
            number=1,
        )
        return build_dataset(request, bench.clock)

    stores = [str(collector.store) for collector in bench.collectors[:2]]
    for store in (0, 1):
        bench.send(chain(bench.rollout(f"early{store}"), 1).reward(store), store=store)
    places = last_places(stores)
    for store in (0, 1):
        bench.send(chain(bench.rollout(f"late{store}"), 1).reward(store), store=store)
    found = [
        sorted(one.removeprefix(f"{bench.run_id}-") for one in rows(build(since, number))["rollout_id"])
        for number, since in enumerate((places, (0, places[1]), (0, 0)))
    ]
    assert found == [["late0", "late1"], ["early0", "late0", "late1"], ["early0", "early1", "late0", "late1"]]
    manifest = json.loads(json.dumps(build(places, 0).manifest))
    assert manifest["settings"]["since_seq"] == list(places), "building it again finds the same dataset"
    with pytest.raises(UsageError, match="1 places since_seq for 2 stores: name one for each"):
        build((0,), 3)

"""Rewards since a place in the store, from a real collector."""

import dataclasses

from tests.processing.conftest import Bench, bench, collectors, run_id  # noqa: F401 - fixtures
from tests.processing.support.traces import chain
from trainspan_cli.clients.new_rewards import last_seq, new_rewards
from trainspan_schemas.config.settings import DatasetSettings


def test_rewards_are_counted_once_by_name_and_only_if_they_count(bench: Bench) -> None:  # noqa: F811
    store, settings = str(bench.collectors[0].store), DatasetSettings()
    begin = last_seq(store)
    assert new_rewards(store, settings, begin) == (0, begin)
    bench.send(chain(bench.rollout("a"), 2).reward(1.0), chain(bench.rollout("b", status=None), 1))
    count, place = new_rewards(store, settings, begin)
    assert count == 1
    assert place > begin
    assert new_rewards(store, settings, place) == (0, place)
    bench.send(chain(bench.rollout("c"), 1).reward(0.5, **{"gen_ai.evaluation.name": "it's good"}))
    assert new_rewards(store, settings, place)[0] == 0, "of another name"
    quoted = dataclasses.replace(settings, reward_name="it's good=1,reward?=0.5")
    assert new_rewards(store, quoted, begin)[0] == 2
    judged = dataclasses.replace(settings, reward="judge:score")
    assert new_rewards(store, judged, begin)[0] == 2, "rollouts that ended: a and c"

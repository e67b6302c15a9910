"""Rewards since a place in the store, from a real collector."""

from pathlib import Path
from typing import Any

from tests.processing.conftest import Bench, bench, collectors, run_id  # noqa: F401 - fixtures
from tests.processing.support.labels import label, pair, send_labels
from tests.processing.support.traces import TestRollout, chain, send
from tests.support.collector.process import running
from trainspan_loop.clients.new_rewards import last_places, new_rewards, validation_rewards
from trainspan_schemas.config.settings import DatasetSettings, PolicySettings, Settings
from trainspan_schemas.store.roles import Role, token_of
from trainspan_schemas.telemetry import keys


def test_rewards_are_counted_once_by_name_and_only_if_they_count(bench: Bench) -> None:  # noqa: F811
    store, settings = [str(bench.collectors[0].store)], Settings()
    begin = last_places(store)
    assert new_rewards(store, settings, begin) == (0, begin)
    bench.send(chain(bench.rollout("a"), 2).reward(1.0), chain(bench.rollout("b", status=None), 1))
    count, place = new_rewards(store, settings, begin)
    assert count == 1
    assert place > begin
    assert new_rewards(store, settings, place) == (0, place)
    bench.send(chain(bench.rollout("c"), 1).reward(0.5, **_named("it's good")))
    assert new_rewards(store, settings, place)[0] == 0, "of another name"
    quoted = Settings(dataset=DatasetSettings(reward_name="it's good=1,reward?=0.5"))
    assert new_rewards(store, quoted, begin)[0] == 2
    judged = Settings(dataset=DatasetSettings(reward="judge:score"))
    assert new_rewards(store, judged, begin)[0] == 2, "rollouts that ended: a and c"
    bench.send(chain(bench.rollout("d"), 1).reward(float("nan")))
    assert new_rewards(store, settings, place)[0] == 0, "no number"


def test_labels_are_rewards(bench: Bench) -> None:  # noqa: F811
    store = [str(bench.collectors[0].store)]
    a, b, c = (chain(bench.rollout(name), 1) for name in "abc")
    bench.send(a, b, c)
    begin = last_places(store)
    grpc = bench.collectors[0].grpc
    send_labels(grpc, label(a, "good"), label(b, "bad", call=0), *pair((b, c), "better"))
    send_labels(grpc, label(c, "withdrawn"))
    named = Settings(dataset=DatasetSettings(reward_name="other", admit="untrusted_reward"))
    for settings in (Settings(), named):
        assert new_rewards(store, settings, begin)[0] == 2, "neither a preference nor what was taken back"
    tokens = bench.collectors[0].store.parent / "home" / "tokens.toml"
    send_labels(grpc, label(c, "bad"), authorization=f"Bearer {token_of(tokens, Role.AGENT.value)}")
    assert new_rewards(store, named, begin)[0] == 2, "nor an agent's own"


def test_rewards_of_untrusted_senders_count_if_the_dataset_admits_them(tmp_path: Path) -> None:
    """Otherwise live traffic whose agents reward themselves would never begin a round."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'agent = "{"a" * 20}"\nrunner = "{"r" * 20}"\n')
    tokens.chmod(0o600)
    with running(tmp_path / "spans.duckdb", "--token-file", str(tokens)) as collector:
        store = [str(collector.store)]
        send(str(collector.address.grpc), [TestRollout("a").reward(1.0)], "a" * 20)
        send(str(collector.address.grpc), [TestRollout("b").reward(1.0)], "r" * 20)
        assert new_rewards(store, Settings(), (0,))[0] == 1
        admitting = Settings(dataset=DatasetSettings(admit="untrusted_reward"))
        assert new_rewards(store, admitting, (0,))[0] == 2


def test_rewards_in_several_stores_are_added_up_and_each_store_has_its_own_place(bench: Bench) -> None:  # noqa: F811
    stores, settings = [str(collector.store) for collector in bench.collectors[:2]], Settings()
    begin = last_places(stores)
    bench.send(chain(bench.rollout("a"), 1).reward(1.0), store=0)
    bench.send(chain(bench.rollout("b"), 1).reward(1.0), chain(bench.rollout("c"), 1).reward(0.0), store=1)
    count, places = new_rewards(stores, settings, begin)
    assert count == 3
    assert new_rewards(stores, settings, places) == (0, places)
    assert new_rewards(stores, settings, (begin[0], places[1]))[0] == 1


def test_rollouts_of_a_validation_are_known_whatever_rewards_them(bench: Bench) -> None:  # noqa: F811
    store = [str(bench.collectors[0].store)]
    begin = last_places(store)
    bench.send(
        chain(bench.rollout("a", split="val"), 1).reward(1.0),
        chain(bench.rollout("b", split="val"), 1).reward(0.0),
        chain(bench.rollout("c"), 1).reward(1.0),
    )
    for settings in (Settings(), Settings(dataset=DatasetSettings(reward="judge:score"))):
        assert new_rewards(store, settings, begin)[0] == 3
        assert validation_rewards(store, settings, begin) == 2


def test_rewards_of_every_policy_count(bench: Bench) -> None:  # noqa: F811
    store = [str(bench.collectors[0].store)]
    begin = last_places(store)
    bench.send(
        chain(bench.rollout("a"), 1).reward(1.0, **_named("quality")),
        chain(bench.rollout("b"), 1).reward(1.0, **_named("speed")),
        chain(bench.rollout("c"), 1).reward(1.0),
    )

    def count(**policies: PolicySettings) -> int:
        return new_rewards(store, Settings(policies=policies), begin)[0]

    named = {"writer": PolicySettings(reward_name="quality"), "rewriter": PolicySettings(reward_name="speed,quality")}
    assert count(**named) == 2, "those named `reward` are of no policy"
    assert count(**named, editor=PolicySettings()) == 3
    assert count(**named, editor=PolicySettings(reward="judge:score")) == 3, "rollouts that ended"


def _named(name: str) -> dict[str, Any]:
    return {keys.EVALUATION_NAME: name}

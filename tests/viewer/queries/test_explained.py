"""By which dataset a rollout is explained, for how long an account is kept, and with which tokenizer it is read."""

from pathlib import Path

import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from trainspan_schemas.settings import Settings
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.places import Places
from trainspan_viewer.queries.rollout.rollout import load_rollout
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader


@pytest.fixture
def sources(bench: Bench, tmp_path: Path) -> Sources:
    """A run with its folder of datasets."""
    store = str(bench.collectors[0].store)
    folder = tmp_path / "runs" / bench.run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    return Sources(Places(store, tmp_path / "runs", tmp_path / "dataset"), StoreReader(store), Settings())


def test_an_attempt_that_the_dataset_did_not_see_is_explained_by_the_store(bench: Bench, sources: Sources) -> None:
    bench.send(chain(bench.rollout("a"), 1).reward(1.0), chain(bench.rollout("b"), 1).reward(0.0))
    bench.build(round_=0, out=sources.places.run(bench.run_id).datasets)
    bench.send(chain(bench.rollout("a", attempt=1), 2).reward(0.5))
    name = f"{bench.run_id}-a"
    first = load_rollout(sources, Params("/", {"rollout": name}, {"attempt": ["0"]}))
    assert (first.links.dataset, len(first.account.calls)) == (f"{bench.run_id}:round-0000", 1)
    second = load_rollout(sources, Params("/", {"rollout": name}, {"attempt": ["1"]}))
    assert (second.links.dataset, len(second.account.calls)) == (None, 2)

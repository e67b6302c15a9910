"""What the trainer measured at the tokens of a call: joined with the call, or the reason why it is missing."""

import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from tests.viewer.support.trainer_figures import ENTROPIES, write_figures
from trainspan_schemas.config.settings import Settings
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import ViewerPaths
from trainspan_viewer.queries.rollout.tokens import TokensModel, load_tokens
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader


def _load(bench: Bench, call: int, overlay: str, dataset: str = "round-0000") -> TokensModel:
    store = str(bench.collectors[0].store)
    sources = Sources(ViewerPaths(bench.out.parent / "runs", bench.out), StoreReader(store), Settings())
    path = {"rollout": f"{bench.run_id}-a", "call": str(call)}
    return load_tokens(sources, Params("/", path, {"overlay": [overlay], "dataset": [dataset]}))


def test_each_token_has_its_figures(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 2).reward(reward) for name, reward in (("a", 1.0), ("b", 0.0))))
    built = bench.build(round_=0)
    without = _load(bench, 1, "entropy")
    assert without.overlay is None
    assert without.missing == "no checkpoint here was trained on this dataset, or it has been pruned"
    assert "entropy" not in without.available

    write_figures(bench.out.parent / "checkpoints", built.path, f"{bench.run_id}-a")
    entropy = _load(bench, 1, "entropy").overlay
    assert entropy is not None
    assert entropy.values == pytest.approx(ENTROPIES)
    assert entropy.greatest == 2.0
    apart = _load(bench, 1, "mismatch").overlay
    assert apart is not None
    assert apart.values == pytest.approx([0, 0, 0, 0, -1.0])
    assert "the policy's movement in 1 earlier steps" in apart.meaning
    clip = _load(bench, 1, "clip").overlay
    assert clip is not None
    assert list(clip.values) == [0, 0, 0, 0, -1]
    ratio = _load(bench, 1, "ratio").overlay
    assert ratio is not None
    assert ratio.values[4] == pytest.approx(-0.6931472)
    assert "clipped outside 0.8 to 1.25" in ratio.meaning
    assert "did not train this call" in str(_load(bench, 0, "entropy").missing)
    assert "not part of a dataset" in str(_load(bench, 1, "entropy", "none").missing)
    mask = _load(bench, 0, "mask").overlay
    assert mask is not None
    assert list(mask.values) == [1.0] * 5

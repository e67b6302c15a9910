"""What the trainer measured at the tokens of a call: joined with the call, or the reason why it is missing."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_schemas.artifacts.trained_tokens import METADATA, VERSION, part_name, tokens_dir
from trainspan_schemas.config.settings import Settings
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.places import Places
from trainspan_viewer.queries.rollout.tokens import TokensModel, load_tokens
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader

ENTROPIES = [0.1, 0.2, 0.3, 0.4, 2.0]


def _write(checkpoints: Path, dataset: Path, rollout_id: str, **more: Any) -> None:
    """The figures of call 1 of one rollout, as two processes write them."""
    digest = hashlib.sha256(manifest_path(dataset).read_bytes()).hexdigest()
    (checkpoints / "policy-000001").mkdir(parents=True)
    (checkpoints / "policy-000001" / "trainspan.json").write_text(json.dumps({"dataset_sha256": digest}))
    folder = tokens_dir(checkpoints, "policy-000001")
    folder.mkdir(parents=True)
    about = {"version": VERSION, "clip": [0.8, 1.25], "steps": 2, "ratio": "token", "left_out": {}}
    row = {
        "row": 1,
        "rollout_id": rollout_id,
        "attempt": 0,
        "call_index": 1,
        "step": 2,
        "trainer_logprobs": [-0.5, -0.5, -0.5, -0.5, -1.5],
        "old_logprobs": None,
        "entropies": ENTROPIES,
        "ratios": [1.0, 1.0, 1.0, 1.0, 0.5],
        "clipped": [0, 0, 0, 0, -1],
        **more,
    }
    schema = pa.schema(
        [("row", pa.int64()), ("rollout_id", pa.string())]
        + [(name, pa.int32()) for name in ("attempt", "call_index", "step")]
        + [(name, pa.list_(pa.float32())) for name in ("trainer_logprobs", "old_logprobs", "entropies", "ratios")]
        + [("clipped", pa.list_(pa.int8()))],
        metadata={METADATA: json.dumps(about)},
    )
    for rank, rows in enumerate(([], [row])):
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / part_name(rank, 2))


def _load(bench: Bench, call: int, overlay: str, dataset: str = "round-0000") -> TokensModel:
    store = str(bench.collectors[0].store)
    sources = Sources(Places(store, bench.out.parent / "runs", bench.out), StoreReader(store), Settings())
    path = {"rollout": f"{bench.run_id}-a", "call": str(call)}
    return load_tokens(sources, Params("/", path, {"overlay": [overlay], "dataset": [dataset]}))


def test_each_token_has_its_figures(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 2).reward(reward) for name, reward in (("a", 1.0), ("b", 0.0))))
    built = bench.build(round_=0)
    without = _load(bench, 1, "entropy")
    assert without.overlay is None
    assert without.missing == "no checkpoint here was trained on this dataset, or it has been pruned"
    assert "entropy" not in without.available

    _write(bench.out.parent / "checkpoints", built.path, f"{bench.run_id}-a")
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

"""CPU time of the policy server with a LoRA adapter: merged into the weights, or computed next to them at each token.

The requests are those of `sampling`. `TRAINSPAN_BENCH_MODEL` names a folder with the model (see `tools/pretrained_model.py`).
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.serving.sampling import rounds, run_round
from tests.support.models.adapters import make_adapter
from tests.support.policy_server.process import policy_server

__all__ = ["measure"]

_RANK = 16
_SCALE = 0.02
"""Of the adapter's random weights: small, so that answers stay as long as the model's own."""
_CONCURRENCY = 128
_PASSES = 2
"""Measured passes, of different problems; the first pass after the start is left out."""


def measure() -> dict[str, Any]:
    """CPU and wall seconds of each pass, and seconds of a swap, by how the adapter is served; `none`: the weights alone."""
    model = Path(os.environ["TRAINSPAN_BENCH_MODEL"]).resolve()
    found: dict[str, Any] = {"rank": _RANK}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = Path(scratch, "checkpoints")
        make_adapter(model, checkpoints / "policy-000001", 1, seed=1, rank=_RANK, scale=_SCALE)
        for way, merge in (("none", "true"), ("merged", "true"), ("live", "false")):
            arguments = ["--collector", "none", "--checkpoints", str(checkpoints), "--max-lora-rank", str(_RANK)]
            flags = ["--max-num-seqs", str(_CONCURRENCY), "--max-model-len", "1024"]
            setting = {"TRAINSPAN_SERVING__MERGE_ADAPTERS": merge}
            home = Path(scratch, way)
            with policy_server(model, home, *arguments, flags=flags, environment=setting) as server:
                if way != "none":
                    status, answer = server.swap("policy-000001", 1)
                    assert status == 200, answer
                    found[f"{way}_swap_s"] = answer["seconds"]
                asked = rounds()
                run_round(server, next(asked), _CONCURRENCY)
                passes = [run_round(server, next(asked), _CONCURRENCY) for _ in range(_PASSES)]
            for name in ("cpu_s", "wall_s"):
                found[f"{way}_{name}"] = [figures[name] for figures in passes]
    return found

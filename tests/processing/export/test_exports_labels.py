"""`trainspan export dpo` with pairs that a person compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench
from tests.processing.export.test_exports import _chat, _export, _lines
from tests.processing.support.labels import label, pair, send_labels
from tests.processing.support.traces import TestRollout

pytestmark = pytest.mark.ci


def _answered(rollout: TestRollout, answer: str) -> TestRollout:
    """A rollout with a single, vendor call, which only the client's span records."""
    rollout.span("client", 1.0, 2.0, **{key.replace(".", "__"): value for key, value in _chat("2+2?", answer).items()})
    return rollout


def _said(row: dict[str, Any]) -> tuple[str, str]:
    return row["chosen"][0]["content"], row["rejected"][0]["content"]


def test_a_persons_pairs_replace_the_best_and_worst_of_their_group(bench: Bench, tmp_path: Path) -> None:
    a, b, c = (
        _answered(bench.rollout(name), name).reward(reward) for name, reward in (("a", 1.0), ("b", 0.0), ("c", 1.0))
    )
    other = [_answered(bench.rollout(f"o{n}", task="other"), f"o{n}").reward(float(n)) for n in (0, 1)]
    bench.send(a, b, c, *other)
    grpc = bench.collectors[0].grpc
    send_labels(grpc, *pair((a, b), "better"), *pair((a, c), "better"))
    send_labels(grpc, *pair((b, a), "better", 200.0))
    done = _export(bench, "dpo", bench.collectors[0].store, tmp_path / "out.jsonl", "--run", bench.run_id)
    assert done.returncode == 0, done.stderr
    assert {_said(row) for row in _lines(tmp_path / "out.jsonl")} == {("b", "a"), ("a", "c"), ("o1", "o0")}
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert (manifest["groups"], manifest["groups_used"], manifest["skipped"]) == (2, 2, {})


def test_pairs_need_no_reward_and_what_gives_none_is_counted(bench: Bench, tmp_path: Path) -> None:
    a, b, same = (_answered(bench.rollout(name), text) for name, text in (("a", "4"), ("b", "5"), ("c", "4")))
    held_out = _answered(bench.rollout("d", split="val"), "6")
    bench.send(a, b, same, held_out)
    grpc = bench.collectors[0].grpc
    send_labels(grpc, *pair((a, b), "better"), *pair((a, same), "better"), *pair((b, same), "equal"))
    send_labels(grpc, *pair((a, held_out), "better"), label(b, "withdrawn", 50.0))
    done = _export(bench, "dpo", bench.collectors[0].store, tmp_path / "out.jsonl", "--run", bench.run_id)
    assert done.returncode == 0, done.stderr
    assert [_said(row) for row in _lines(tmp_path / "out.jsonl")] == [("4", "5")]
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["skipped"] == {"labeled_same_answers": 1, "labeled_equal": 1, "labeled_not_selected": 1}
    assert manifest["sources"][0]["chosen"] == {"rollout_id": a.rollout_id, "attempt": 0, "reward": None}


def test_a_pair_of_a_dataset_is_exported_as_messages(bench: Bench, tmp_path: Path) -> None:
    rollouts = []
    for name in ("a", "b"):
        rollout = bench.rollout(name)
        client = rollout.span(
            "client", 1.0, 3.0, **{key.replace(".", "__"): value for key, value in _chat("2+2?", name).items()}
        )
        rollout.call(0, [1, 2], [3, 4 + len(rollouts)], parent=client, at=2.0)
        rollouts.append(rollout.reward(float(len(rollouts))))
    bench.send(*rollouts)
    send_labels(bench.collectors[0].grpc, *pair(rollouts, "better"))
    built = bench.build(round_=0)
    assert built.manifest["labels"] == {"preferences": 2}
    done = _export(bench, "dpo", built.path, tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert [_said(row) for row in _lines(tmp_path / "out.jsonl")] == [("a", "b")]

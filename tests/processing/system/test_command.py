"""`trainspan dataset` as a user runs it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from tests.support.models.byte_tokenizer import encode, make_byte_tokenizer
from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_training.data.dataset import open_dataset, read_calls

pytestmark = pytest.mark.ci

_SIDES = ("both", "call 0", "call 1")


def _run(
    bench: Bench, *arguments: str, timeout_s: float = 60.0, home: Path | None = None
) -> subprocess.CompletedProcess[str]:
    store = str(bench.collectors[0].store)
    return subprocess.run(
        [sys.executable, "-m", "trainspan_cli", "dataset", "--store", store, "--out", str(bench.out), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "COLUMNS": "120", **({"TRAINSPAN_HOME": str(home)} if home else {})},
    )


def test_a_round_is_built_printed_and_read_by_its_consumers(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name, round=3), 2).reward(float(name == "a")) for name in "ab"))
    table = _run(bench, "--run", bench.run_id, "--round", "3")
    assert table.returncode == 0, table.stderr
    assert "calls kept: 4 of 4 (coverage 100.0%)" in table.stdout
    assert "identical × grpo" in table.stdout
    answer = _run(bench, "--run", bench.run_id, "--round", "3", "--format", "json")
    manifest = json.loads(answer.stdout)
    folder = bench.out / "round-0003"
    assert Path(manifest["path"]) == folder
    assert manifest["sha256"] == hashlib.sha256(manifest_path(folder).read_bytes()).hexdigest()
    assert len(read_calls(open_dataset(folder))[0]) == 4
    count = duckdb.execute(f"SELECT count(*), sum(len(completion_ids)) FROM '{folder}/*.parquet'").fetchall()
    assert count == [(4, 20)]


def test_failed_merges_are_shown_on_request_as_ids_and_as_text(bench: Bench, tmp_path: Path) -> None:
    model = make_byte_tokenizer(tmp_path)
    system, thought, answer = (
        encode(model, text) for text in ("be brief\n", "<think>hm \x1b]52;</think>", "four[/bold]")
    )
    for name in "ab":
        rollout = bench.rollout(name).reward(float(name == "a"))
        rollout.call(0, system, [*thought, *answer])
        rollout.call(1, [*system, *answer, *encode(model, "\nsure?")], encode(model, "yes"))
        bench.send(rollout)
    shown = _run(bench, "--run", bench.run_id, "--round", "0", "--show-merge-failures", "--model", str(model)).stdout
    assert "not merged: reasoning (2 calls)" in shown
    assert "the reasoning of an earlier answer was left out of the history" in shown
    first = f"rollout {bench.run_id}-a: call 1 of agent agent departs from call 0 at token {len(system)}"
    assert f"{first}; see: trainspan explain {bench.run_id}-a --dataset {bench.out / 'round-0000'}" in shown
    lines = [line.strip() for line in shown[shown.index(first) :].splitlines()[1:7]]
    sides = [system[-8:], [*thought, *answer][:24], encode(model, "four[/bold]\nsure?")]
    assert lines[::2] == [f"{name}: {' '.join(map(str, ids))}" for name, ids in zip(_SIDES, sides, strict=True)]
    assert lines[1::2] == [r"'e brief\n'", r"'<think>hm \x1b]52;</think>f'", r"'four[/bold]\nsure?'"]
    assert "\x1b" not in shown


def test_without_failed_merges_it_says_so(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 2).reward(float(name == "a")) for name in "ab"))
    shown = _run(bench, "--run", bench.run_id, "--round", "0", "--show-merge-failures").stdout
    assert "every call continues its agent's previous call, or is its first" in shown


def test_nothing_to_train_on_gives_an_explanation_and_exit_code_3(bench: Bench) -> None:
    bench.send(chain(bench.rollout("a"), 1))
    failed = _run(bench, "--run", bench.run_id)
    assert (failed.returncode, failed.stdout) == (3, "")
    summary, reason = failed.stderr.splitlines()
    assert "most excluded by no_reward (1): call trainspan.reward" in summary
    assert f"no_reward: 1 call; e.g. call 0 of rollout {bench.run_id}-a (agent agent, " in reason
    done = _run(bench, "--run", bench.run_id, "--round", "0", "--format", "json")
    assert done.returncode == 3
    record = json.loads(done.stdout)
    assert record.pop("nothing_to_train") in done.stderr
    (reason,) = record.pop("reasons")
    assert (reason["name"], reason["calls"], reason["lowers_coverage"]) == ("no_reward", 1, True)
    assert record == {
        "event": "no_dataset",
        "store_error": None,
        "rollouts_seen": 1,
        "calls_seen": 1,
        "calls_trainable": 0,
        "coverage": 0.0,
        "dropped": {"no_reward": 1},
        "dropped_without_tokens": {},
    }
    assert not list(bench.out.glob("round=*"))


def test_too_few_calls_to_train_on_are_reported_with_what_could_be_trained(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(float(name == "a")) for name in "ab"))
    bench.send(*(chain(bench.rollout(name), 1) for name in "cde"))
    done = _run(bench, "--run", bench.run_id, "--round", "0", "--format", "json")
    assert done.returncode == 3
    assert "only 40% of the calls in round 0" in done.stderr
    assert [json.loads(done.stdout)[key] for key in ("calls_seen", "calls_trainable", "coverage")] == [5, 2, 0.4]


def test_a_round_without_contrast_is_no_failure(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(1.0) for name in "ab"))
    answer = _run(bench, "--run", bench.run_id, "--round", "0", "--format", "json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["rows"] == 0


def test_an_unknown_baseline_is_a_usage_error(bench: Bench) -> None:
    assert _run(bench, "--baseline", "grp").returncode == 2


def test_a_url_is_not_taken_for_a_folder(bench: Bench, tmp_path: Path) -> None:
    """The last --out counts."""
    bench.send(*(chain(bench.rollout(name), 2).reward(float(name == "a")) for name in "ab"))
    url = f"file://{tmp_path}/bucket"
    done = _run(bench, "--run", bench.run_id, "--out", url, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{url}/round-0000\n")
    assert not bench.out.exists()


def test_a_store_that_is_not_there_is_named(bench: Bench) -> None:
    missing = _run(bench, "--store", "/nowhere/spans.duckdb")
    assert missing.returncode == 1
    assert "no store at /nowhere/spans.duckdb" in missing.stderr


def test_the_command_loads_neither_the_collector_nor_the_trainer_nor_pandas(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 2).reward(float(name == "a")) for name in "ab"))
    code = (
        "import sys; from trainspan_cli.main import run; run(sys.argv[1:]); "
        "print([m for m in ('duckdb', 'torch', 'datasets', 'grpc', 'pandas') if m in sys.modules])"
    )
    store = str(bench.collectors[0].store)
    arguments = ["dataset", "--store", store, "--out", str(bench.out), "--run", bench.run_id]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_each_policy_has_a_dataset_of_its_own_calls_with_its_own_credit(bench: Bench, tmp_path: Path) -> None:
    """A rollout is used once by each policy; the calls of the others are counted by name."""
    config = tmp_path / "trainspan.toml"
    config.write_text(
        '[model]\nadapter = "lora"\n[policies.writer]\n[policies.rewriter]\ncredit = "return_to_go"\ngamma = 0.5\n'
    )
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name, round=1)
        for index, policy in enumerate(["writer", "rewriter", "rewriter"]):
            rollout.call(index, [1, index], [2], trainspan__policy__name=policy)
        bench.send(rollout.reward(reward))
    options = ("--config", str(config), "--run", bench.run_id, "--round", "1", "--format", "json")
    found = {}
    for policy in ("writer", "rewriter"):
        built = _run(bench, *options, "--policy", policy)
        assert built.returncode == 0, built.stderr
        found[policy] = json.loads(built.stdout)
        assert Path(found[policy]["path"]) == bench.out / policy / "round-0001"
    assert [one["policy"] for one in found.values()] == ["writer", "rewriter"]
    assert [one["dropped"] for one in found.values()] == [{"other_policy": 4}, {"other_policy": 2}]
    returns = {
        policy: duckdb.execute(
            f"SELECT call_index, \"return\" FROM '{bench.out}/{policy}/round-0001/*.parquet' WHERE reward IS NULL "
            "AND rollout_reward = 1 ORDER BY call_index"
        ).fetchall()
        for policy in found
    }
    assert returns == {"writer": [(0, 1.0)], "rewriter": [(1, 0.5), (2, 1.0)]}
    unnamed = _run(bench, "--config", str(config))
    assert unnamed.returncode == 2
    assert unnamed.stderr == "trainspan: name one of the policies with --policy: writer, rewriter\n"

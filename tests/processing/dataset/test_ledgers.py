"""The ledgers of many datasets: one row per rollout, and never believed if one has changed."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import chain
from trainspan_processing.assembly.recorded import recorded
from trainspan_processing.dataset.ledger import LEDGER, Earlier, LedgerFile, read_ledger, write_ledger
from trainspan_processing.dataset.published import open_published
from trainspan_schemas.artifacts.dataset import about_dir, dataset_dir
from trainspan_schemas.errors import DatasetError
from trainspan_schemas.telemetry import keys


def publish(out: Path, number: int, *lines: dict[str, Any]) -> Path:
    folder = dataset_dir(out, number)
    about = about_dir(folder)
    folder.mkdir(parents=True)
    about.mkdir()
    given = [{"attempt": 0, "calls": 1, "kept": 1, "reward": 1.0, "reward_digest": "d", **line} for line in lines]
    write_ledger(about, pl.DataFrame(given, schema=LEDGER))
    return about / "rollouts.jsonl"


def test_of_a_rollout_that_several_datasets_saw_the_ledger_has_one_row(tmp_path: Path) -> None:
    files = [publish(tmp_path, number, {"rollout_id": f"r{number}"}) for number in range(2)]
    publish(tmp_path, 2, {"rollout_id": "r2"}, {"rollout_id": "r0", "kept": 0, "calls": 5, "reason": "late"})
    publish(tmp_path, 3, {"rollout_id": "r1", "calls": 7, "reward": None, "reward_digest": None})
    ledger = read_ledger(tmp_path)
    assert [file.name for file in ledger.files] == [f"round-000{number}" for number in range(4)]
    rows_of = {
        row["rollout_id"]: (row["calls"], row["kept"], row["reward"]) for row in ledger.rows.iter_rows(named=True)
    }
    assert rows_of == {"r0": (5, 1, 1.0), "r1": (7, 1, 1.0), "r2": (1, 1, 1.0)}
    files[0].unlink()
    with pytest.raises(
        DatasetError, match=r"rollouts\.jsonl is missing, so the rollouts that round-0000 used are unknown"
    ):
        read_ledger(tmp_path)


def test_a_manifest_names_the_datasets_before_it_in_few_words() -> None:
    files = [LedgerFile(f"round-{number:04d}", f"{number}") for number in (0, 1, 2, 5, 7, 8)]
    earlier = Earlier.of(files)
    assert earlier.rounds == ((0, 2), (5, 5), (7, 8))
    assert ([number in earlier for number in (2, 3, 5, 9)], len(earlier)) == ([True, False, True, False], 6)
    assert (
        Earlier.of_record(json.loads(json.dumps({"rounds": earlier.rounds, "ledgers_sha256": "x"}))).rounds
        == earlier.rounds
    )
    assert Earlier.of(list(reversed(files))) == earlier != Earlier.of([*files[:-1], LedgerFile("round-0008", "9")])
    with pytest.raises(DatasetError, match="of an earlier version"):
        Earlier.of_record([{"name": "round-0000", "ledger_sha256": "x"}])


def test_a_rebuild_needs_the_same_datasets_before_it(bench: Bench) -> None:
    for name in "abc":
        bench.send(chain(bench.rollout(name, begins=100.0 * ord(name)), 1).reward(1.0))
        built = bench.build(baseline="none")
    assert built.manifest["earlier"]["rounds"] == [[0, 1]]
    published = open_published(built.path)
    assert recorded(published, published.stores).earlier.rows.height == 2
    first = about_dir(dataset_dir(bench.out, 0)) / "rollouts.jsonl"
    kept = first.read_text()
    first.write_text(kept.replace("1.0", "2.0"))
    with pytest.raises(DatasetError, match=r"was built after 2 datasets in .*, and a ledger there has changed"):
        recorded(published, published.stores)
    first.write_text(kept)
    about = about_dir(dataset_dir(bench.out, 1))
    about.rename(about.with_name("elsewhere"))
    with pytest.raises(DatasetError, match=r"round-0001 is missing, but .*round-0002 was built after it"):
        recorded(published, published.stores)


@pytest.mark.ci
@pytest.mark.parametrize("baseline", ["running", "rae"])
def test_rewards_that_were_defined_otherwise_are_no_history(
    bench: Bench, baseline: str, caplog: pytest.LogCaptureFixture
) -> None:
    style = {"gen_ai.evaluation.name": "style"}
    bench.send(chain(bench.rollout("a"), 1).reward(100.0, **style))
    bench.build(baseline="none", reward_name="style")
    bench.send(
        chain(bench.rollout("b", begins=100.0), 1).reward(2.0), chain(bench.rollout("c", begins=200.0), 1).reward(3.0)
    )
    built = bench.build(baseline=baseline)
    assert built.manifest["history"] == {"rollouts": 0, "otherwise_rewarded": 1}
    assert "event=history_left_out rollouts=1" in caplog.text
    # running: b has nothing before it, c is compared with b; rae: b = .05 · 2 = .1, then .95 · .1 + .05 · 3 = .245
    expected = [1.0] if baseline == "running" else [pytest.approx(1.9), pytest.approx(2.755)]
    assert rows(built)["advantage"].to_list() == expected
    bench.send(chain(bench.rollout("d", begins=300.0), 1).reward(4.0))
    again = bench.build(baseline=baseline)
    assert again.manifest["history"] == {"rollouts": 2, "otherwise_rewarded": 1}
    # running: the mean of 2 and 3; rae: .95 · .245 + .05 · 4 = .43275
    assert rows(again)["advantage"].to_list() == [1.5 if baseline == "running" else pytest.approx(3.56725)]
    assert bench.build(baseline="none", out=bench.out.with_name("none")).manifest["history"] is None


@pytest.mark.ci
@pytest.mark.parametrize(("baseline", "expected"), [("running", [1.0]), ("global", [-0.70711, 0.70711])])
def test_verdicts_of_different_judges_are_not_compared_with_each_other(
    bench: Bench, baseline: str, expected: list[float]
) -> None:
    """`lenient` gave 10 in an earlier dataset and 20 in this one; `strict` gives 2 and 3."""
    verdict = {keys.EVALUATION_SOURCE: "judge"}
    bench.send(chain(bench.rollout("a", judge="m:lenient"), 1).reward(10.0, **verdict))
    bench.build(baseline="none")
    bench.send(chain(bench.rollout("b", judge="m:lenient", task="other", begins=100.0), 1).reward(20.0, **verdict))
    for name, reward in (("c", 2.0), ("d", 3.0)):
        rollout = bench.rollout(name, judge="m:strict", begins=100.0 * (1 + reward))
        bench.send(chain(rollout, 1).reward(reward, **verdict))
    built = rows(bench.build(baseline=baseline))
    strict = built.filter(~pl.col("rollout_id").str.ends_with("-b"))
    assert strict["advantage"].to_list() == [pytest.approx(value, abs=1e-4) for value in expected]
    lenient = built.filter(pl.col("rollout_id").str.ends_with("-b"))["advantage"].to_list()
    assert lenient == ([10.0] if baseline == "running" else [])
    function = "tests.processing.support.reward_functions:length"
    by_function = bench.build(baseline="running", out=bench.out / "function", reward=function)
    assert rows(by_function).height == 3, "a function rewards all: only the first has none before it"


def test_values_of_turns_by_another_credit_rule_or_discount_are_no_history(bench: Bench) -> None:
    """z has 9 at both turns. By `return_to_go` with γ = .5, a and b have .5 and 1 there, c has 1 and 2.

    a was not trained by the first dataset, because nothing was before it, so each later one compares it again."""
    bench.send(chain(bench.rollout("a"), 2).reward(1.0), chain(bench.rollout("z", begins=50.0), 2).reward(9.0))
    turns = {"baseline": "running", "group_over": "turns"}
    bench.build(**turns)
    bench.send(*(chain(bench.rollout(n, begins=100.0 * r), 2).reward(r) for n, r in (("b", 1.0), ("c", 2.0))))
    built = bench.build(**turns, credit="return_to_go", gamma=0.5)
    assert rows(built).select("return", "advantage").rows() == [(0.5, 0.0), (1.0, 0.0), (1.0, 0.5), (2.0, 1.0)]
    bench.send(chain(bench.rollout("d", begins=300.0), 2).reward(4.0))
    again = bench.build(**turns, credit="return_to_go", gamma=0.5)
    assert rows(again).select("return", "advantage").rows() == [
        (2.0, pytest.approx(4 / 3)),
        (4.0, pytest.approx(8 / 3)),
    ]


def test_shares_of_a_rollout_seen_again_are_those_of_its_reward(tmp_path: Path) -> None:
    """It was dropped, and is rewarded otherwise by a dataset that has no shares: those by the earlier reward go."""
    publish(tmp_path, 0, {"rollout_id": "r", "kept": 0, "parts": '{"agent:a": 5.0}', "judge": "m:f"})
    publish(tmp_path, 1, {"rollout_id": "r", "kept": 0, "reward": 2.0, "reward_digest": "e"})
    publish(tmp_path, 2, {"rollout_id": "r", "kept": 0, "reward": None, "reward_digest": None, "judge": "m:g"})
    ledger = read_ledger(tmp_path)
    assert ledger.history("e").values.select("judge", "part", "value").rows() == [(None, "", 2.0)]
    assert ledger.history("d").values.is_empty()

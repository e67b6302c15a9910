"""The figures that a gate compares beside the rewards, from stored calls."""

import json
from pathlib import Path

import pytest

from tests.loop.run_results import run_result
from tests.processing.conftest import Bench
from tests.processing.support.traces import TestRollout, chain
from trainspan_cli.gate.gate_run import SIDES, GateRun, GateSettings, side_run
from trainspan_cli.gate.tripwires import CheckJudge, _tripwire, stored_figures, tripwires
from trainspan_loop.trials.evidence import Evidence
from trainspan_loop.trials.sequential import SequentialTest
from trainspan_rollouts import RunSettings
from trainspan_rollouts.ledger.paths import ledger_file
from trainspan_rollouts.records import Shard
from trainspan_schemas.errors import UsageError


def test_each_rollout_counts_by_its_last_attempt_with_tokens_calls_truncation_refusals_and_tool_errors(
    bench: Bench,
) -> None:
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}
    first = bench.rollout("a", task="t0", attempt=0)
    first.call(0, [1], [2] * 50)
    second = bench.rollout("a", task="t0", attempt=1)
    second.call(0, [1], [2, 3], gen_ai__response__finish_reasons=["length"])
    second.span("tool", 2.0, 3.0, **tool)
    second.spans[-1].failed = True
    refusal = '[{"role":"assistant","parts":[{"type":"text","content":"I cannot"}]}]'
    second.call(1, [1, 2, 3, 4], [5, 6, 7], gen_ai__output__messages=refusal)
    other = bench.rollout("b", task="t1")
    other.call(0, [1], [2])
    bench.send(first, second, other)
    found = stored_figures([str(bench.collectors[0].store)], bench.run_id, {first.rollout_id, other.rollout_id})
    assert found["answer tokens per rollout"] == {"t0": [5.0], "t1": [1.0]}
    assert found["calls per rollout"] == {"t0": [2.0], "t1": [1.0]}
    assert found["truncated answers"] == {"t0": [0.5], "t1": [0.0]}
    assert found["tool errors per rollout"] == {"t0": [1.0], "t1": [0.0]}
    assert found["refusals"]["t0"] == [1.0]


def test_the_reward_of_the_judge_is_compared_with_a_second_judge(bench: Bench, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"id": f"t{n}", "input": "2+2?", "answer": "4"}) + "\n" for n in range(4)))
    ids = {bench.rollout(f"{number}").rollout_id for number in range(4)}
    for number, (text, reward) in enumerate([("4", 1.0), ("five", 1.0), ("4", 0.25), (None, 1.0)]):
        rollout = bench.rollout(f"{number}", task=f"t{number}", judge="judge.py:score")
        parts = [{"role": "assistant", "parts": [{"type": "text", "content": text}]}]
        messages = {} if text is None else {"gen_ai__output__messages": json.dumps(parts)}
        rollout.call(0, [1], [2], **messages)
        rollout.reward(reward, **{"trainspan.evaluation.source": "judge"})
        bench.send(rollout)
    check = CheckJudge("exact:answer", tasks)
    found = stored_figures([str(bench.collectors[0].store)], bench.run_id, ids, {"gap": (check.gap, "")})
    assert found == {"gap": {"t0": [0.0], "t1": [1.0], "t2": [-0.75]}}
    with pytest.raises(UsageError, match=r"--check-judge .* compares rollouts"):
        CheckJudge(f"{__file__}:compares", tasks)


def compares(task: object, results: list[object]) -> list[float]:
    return [0.0 for _ in results]


def test_a_check_that_fails_gives_no_figure(bench: Bench, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "t0", "input": "2+2?"}\n')
    rollout = bench.rollout("a", judge="j").reward(1.0, **{"trainspan.evaluation.source": "judge"})
    rollout.call(0, [1], [2], gen_ai__output__messages='[{"role":"assistant","parts":[{"type":"text","content":"4"}]}]')
    bench.send(rollout)
    check = CheckJudge("exact:answer", tasks)
    stores = [str(bench.collectors[0].store)]
    assert stored_figures(stores, bench.run_id, {rollout.rollout_id}, {"gap": (check.gap, "")}) == {}


def test_rollouts_of_a_chunk_that_was_repeated_count_no_more(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server failed in the chunk: its ledger was deleted, and the repeated rollout has another id."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    for side in range(len(SIDES)):
        name = side_run(bench.run_id, side)
        for which, calls in (("discarded", 3), ("repeated", 1)):
            bench.send(chain(TestRollout(f"{name}-{which}", run=name, split="val"), calls))
        ledger = ledger_file(name, 0, "val", Shard(0, 1))
        ledger.parent.mkdir(parents=True)
        begin = {"begin": "0:t0", "rollout": f"{name}-repeated", "attempt": 0, "task": ""}
        ledger.write_text(f"{json.dumps({'tasks': ''})}\n{json.dumps(begin)}\n")
    settings = GateSettings(RunSettings(tmp_path / "tasks.jsonl", (), bench.run_id), ("", ""), 0.05)
    outcomes, last = Evidence({}, {}, {}), run_result(round=0)
    run = GateRun(settings, 1, ("t0",), (outcomes, outcomes), SequentialTest(0.05, 1.0), (last, last), 0, 1.0)
    found = {wire.name: wire.baseline for wire in tripwires(run, [str(bench.collectors[0].store)])}
    assert found["calls per rollout"] == 1.0


def test_a_figure_is_flagged_if_it_differs_beyond_noise_in_either_direction() -> None:
    # 10 tasks, all greater: p = 2 / 2^10 = .002.
    short = {"calls": {str(task): [1.0] for task in range(10)}}
    long = {"calls": {str(task): [2.0 + task] for task in range(10)}}
    for sides in ((short, long), (long, short)):
        wire = _tripwire("calls", sides, None)
        assert wire.flagged
        assert wire.p is not None
        assert wire.p < 0.01
        # Of 7 tasks it is 2 / 2^7 = .016; one direction alone would be beyond noise.
        few = _tripwire("calls", [{"calls": dict(list(side["calls"].items())[:7])} for side in sides], None)
        assert few.p == pytest.approx(2 / 2**7, rel=0.3)
        assert not few.flagged
    assert not _tripwire("calls", (short, short), None).flagged
    assert _tripwire("refusals", (short, long), "no text").unknown == "no text"

"""When a gate stops, and what it goes on with, from the runner's ledgers alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.loop.run_results import run_result
from trainspan_cli.gate import gate_run
from trainspan_cli.gate.gate_run import GateRun, GateSettings, run_gate
from trainspan_rollouts import RunSettings
from trainspan_rollouts.ledger.paths import ledger_file, run_folder
from trainspan_rollouts.records import Shard
from trainspan_schemas.command_events import RunResult
from trainspan_schemas.errors import UsageError

TASKS = 24
"""Three chunks of eight."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GateSettings:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    tasks, agent = tmp_path / "tasks.jsonl", tmp_path / "agent.py"
    tasks.write_text("".join(json.dumps({"id": str(number), "input": "x"}) + "\n" for number in range(TASKS)))
    agent.write_text("def solve(task): ...\n")
    rollouts = RunSettings(tasks, (f"{agent}:solve",), "g", n=2, judge="exact:answer")
    return GateSettings(rollouts, ("http://old/v1", "http://new/v1"), 0.05)


def _gate(
    settings: GateSettings,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Callable[[str, int, int], dict[str, Any]],
    on_chunk: Callable[[RunSettings], object] = lambda _: None,
) -> GateRun:
    """Runs it with servers that answer, and with `outcome(run, chunk, number of the rollout in the chunk)`."""

    def rollouts(wanted: RunSettings, _: object) -> RunResult:
        on_chunk(wanted)
        names = [json.loads(line)["id"] for line in wanted.tasks.read_text().splitlines()]
        keys = [f"{number}:{name}" for name in names for number in range(wanted.n)]
        ends = [
            {"end": key, "rollout": "r", "attempt": 0, **outcome(wanted.run_id, wanted.round, place)}
            for place, key in enumerate(keys)
        ]
        path = ledger_file(wanted.run_id, wanted.round, "val", Shard(0, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in ({"tasks": "", "target": []}, *ends)))
        return run_result()

    monkeypatch.setattr(gate_run, "run_rollouts", rollouts)
    monkeypatch.setattr(gate_run, "_check_answers", lambda *_: None)
    return run_gate(settings, lambda _: None)


@pytest.mark.parametrize(("lost", "used"), [(1, 8), (2, 16)])
def test_a_decline_is_no_verdict_while_more_than_a_tenth_of_a_side_is_left_out(
    settings: GateSettings, monkeypatch: pytest.MonkeyPatch, lost: int, used: int
) -> None:
    """1 of 16 rollouts is few; 2 of 16 are an eighth, and of 32 a sixteenth: nothing is lost after the first chunk."""

    def outcome(run_id: str, chunk: int, place: int) -> dict[str, Any]:
        if run_id == "g-candidate" and chunk == 0 and place < lost:
            return {"status": "infra_error", "reward": None}
        return {"status": "ok", "reward": float(run_id == "g-baseline")}

    run = _gate(settings, monkeypatch, outcome)
    assert (len(run.used), run.test.is_worse) == (used, True)
    assert sum(run.outcomes[1].left_out.values()) == lost


def test_a_gate_in_which_too_much_is_left_out_for_good_ends_early(
    settings: GateSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 48 rollouts of a side 4.8 may be left out."""
    run = _gate(settings, monkeypatch, lambda *_: {"status": "infra_error", "reward": None})
    assert (len(run.used), run.test.is_worse) == (8, False)


@pytest.mark.parametrize("is_over", [True, False])
def test_a_resumed_gate_goes_on_with_a_chunk_that_ended_and_begins_any_other_anew(
    settings: GateSettings, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    """The gate was interrupted in, or right after, the baseline's second chunk."""
    begun: list[tuple[str, int, bool]] = []

    def outcome(run_id: str, chunk: int, place: int) -> dict[str, Any]:
        return {"status": "ok", "reward": float(place % 2)}

    _gate(settings, monkeypatch, outcome)
    for run, chunk in (("g-candidate", 1), ("g-baseline", 2), ("g-candidate", 2)):
        ledger_file(run, chunk, "val", Shard(0, 1)).unlink()
        (run_folder("g") / f"{run[2:]}-{chunk:04d}.ended").unlink()
    if not is_over:
        (run_folder("g") / "baseline-0001.ended").unlink()

    again = replace(settings, rollouts=replace(settings.rollouts, resume=True))
    _gate(again, monkeypatch, outcome, lambda wanted: begun.append((wanted.run_id, wanted.round, wanted.resume)))
    assert begun == [
        ("g-baseline", 0, True),
        ("g-candidate", 0, True),
        ("g-baseline", 1, is_over),
        ("g-candidate", 1, False),
        ("g-baseline", 2, False),
        ("g-candidate", 2, False),
    ]


def test_a_gate_goes_on_only_with_what_it_was_begun_with(settings: GateSettings) -> None:
    gate_run._open_folder(settings)
    again = replace(settings, rollouts=replace(settings.rollouts, resume=True))
    gate_run._open_folder(again)
    changes: dict[str, Any] = {"n": 3, "judge": "number:answer", "timeout_s": 60.0, "retries": 2, "max_reward": 1.0}
    changes |= {"allow_no_calls": True, "harness": "pi", "workspace": "here", "target": ("agent:solve",)}
    others = {
        name: replace(again, rollouts=replace(again.rollouts, **{name: value})) for name, value in changes.items()
    }
    others |= {"level": replace(again, level=0.1), "candidate": replace(again, urls=("http://old/v1", "http://x/v1"))}
    for name, other in others.items():
        with pytest.raises(UsageError, match=f"cannot resume run g: its {name} is"):
            gate_run._open_folder(other)
    Path(settings.rollouts.target[0].partition(":")[0]).write_text("def solve(task): return 1\n")
    with pytest.raises(UsageError, match="cannot resume run g: its code_sha256 is"):
        gate_run._open_folder(again)


@pytest.mark.parametrize("module", ["gated_agent", "gated.agent"])
def test_a_changed_module_of_the_agents_function_is_not_resumed(
    settings: GateSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    file = tmp_path / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise RuntimeError('imported')\n")
    monkeypatch.chdir(tmp_path)
    rollouts = replace(settings.rollouts, target=(f"{module}:solve",))
    gate_run._open_folder(replace(settings, rollouts=rollouts))
    again = replace(settings, rollouts=replace(rollouts, resume=True))
    gate_run._open_folder(again)
    file.write_text("def solve(task): return 1\n")
    with pytest.raises(UsageError, match="cannot resume run g: its code_sha256 is"):
        gate_run._open_folder(again)

"""The loop's call of `trainspan branch`: when it resumes, and which ends it takes for a round without branches."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspan_cli.loop.processes.stages import NOTHING_TO_BRANCH, Stages
from trainspan_rollouts.run_ledger import ledger_file, points_file
from trainspan_schemas.artifacts.branches import write_points
from trainspan_schemas.config.loop import LoopSettings
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ProcessError

Ended = tuple[int, str, dict[str, Any]]


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    services: Any = SimpleNamespace(stores=("spans.duckdb",), agents_url="http://policy", collector_option=list)
    folder: Any = SimpleNamespace(run_id="run", logs=tmp_path)
    screen: Any = SimpleNamespace(notes=[], progress=lambda _: None)
    screen.note = screen.notes.append
    return Stages(Settings(loop=LoopSettings(target="agent:solve", branches=4)), services, folder, screen)


def ended(monkeypatch: pytest.MonkeyPatch, code: int, result: dict[str, Any] | None) -> list[list[str]]:
    """Lets commands end so; returns their arguments, once they were called."""
    called: list[list[str]] = []

    def command(
        self: Stages,
        name: str,
        arguments: list[str],
        target: Sequence[str],
        on_event: Callable[[dict[str, Any]], None],
        admitted: Sequence[int],
    ) -> tuple[int, str]:
        called.append(arguments)
        if code not in admitted:
            raise ProcessError(f"{name} failed")
        if result is not None:
            on_event({"event": "result", "rollouts": [], **result})
        return code, "a message"

    monkeypatch.setattr(Stages, "_command", command)
    return called


def test_branches_are_resumed_only_if_some_were_begun(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    called = ended(monkeypatch, 0, {"states": 2})
    write_points(points_file("run", 1), [])  # a kill between the points and the first branch leaves these only
    assert stages.branch(1) == {"states": 2}
    ledger = ledger_file("run", 1, None, SimpleNamespace(index=0, count=1), of_branches=True)  # type: ignore[arg-type]
    ledger.touch()
    stages.branch(1)
    assert ["--resume" in arguments for arguments in called] == [False, True]


def test_only_a_round_without_states_to_branch_goes_on_without_branches(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(monkeypatch, NOTHING_TO_BRANCH, None)
    assert stages.branch(1) == {}
    assert stages._screen.notes == ["round 1 has no branches: a message"]  # type: ignore[attr-defined]
    ended(monkeypatch, 1, {"status": {"diverged": 4}})
    assert stages.branch(1) == {"status": {"diverged": 4}}
    for code in (1, 2):
        ended(monkeypatch, code, None)
        with pytest.raises(ProcessError, match="branch failed"):
            stages.branch(1)


@pytest.mark.parametrize("left", [0, 2])
def test_verdicts_that_no_collector_acknowledged_are_sent_again(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    results, called = [{"unacknowledged": 3}, {"unacknowledged": left, "states": 2}], []

    def command(self: Stages, name: str, arguments: list[str], target: Any, on_event: Any, admitted: Any) -> Any:
        called.append("--resume" in arguments)
        on_event({"event": "result", **results.pop(0)})
        return 75 if left or results else 0, "a message"

    monkeypatch.setattr(Stages, "_command", command)
    if left:
        with pytest.raises(ProcessError, match="has not acknowledged all verdicts of branches"):
            stages.branch(1)
    else:
        assert stages.branch(1) == {"unacknowledged": 0, "states": 2}
    assert called == [False, True]


def test_branches_are_tried_again_if_a_store_was_away(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[tuple[int, dict[str, Any]]] = [
        (1, {"store_error": "no connection"}),
        (0, {"event": "result", "states": 2}),
    ]

    def command(self: Stages, name: str, arguments: list[str], target: Any, on_event: Any, admitted: Any) -> Any:
        code, event = answers.pop(0)
        on_event(event)
        return code, "a message"

    monkeypatch.setattr(Stages, "_command", command)
    assert stages.branch(1) == {"states": 2}
    assert not answers

"""What commands print for programs: each event survives its line, and other lines are told apart."""

import json

import pytest

from trainspan_schemas.command_events import (
    BranchesMeasured,
    DatasetBuilt,
    Event,
    FineTuned,
    FineTuneEvaluated,
    FineTuneStarted,
    FineTuneStep,
    NoDataset,
    Progress,
    Ready,
    RoundTrained,
    RunResult,
    TrainingProgress,
    event_line,
    parse,
)
from trainspan_schemas.errors import InvalidRecordError

RESULT = RunResult("r", 2, None, 8, {"ok": 6, "infra_error": 2}, 0.5, 6, 12, 3.5, unacknowledged=1)


@pytest.mark.parametrize(
    "event",
    [
        Ready("http://127.0.0.1:8000", 3, "the CPU"),
        Progress(3, 1, 8, 0.25, 1, 2, {"ok": 2, "timeout": 1}, 3, 5),
        RESULT,
        BranchesMeasured(
            {"run_id": "b", "total": 8}, [{"rollout_id": "r"}], 3, {}, {"other run": 2}, 0.25, 1, 2, 0, 40
        ),
        DatasetBuilt("dataset/round-0001", "ab" * 32, {"rows": 4, "dropped": {"late": 1}}),
        NoDataset(nothing_to_train="no call", figures={"calls_seen": 4, "dropped": {"no_reward": 4}}),
        NoDataset(store_error="no answer"),
        RoundTrained(
            1, 2, "policy-000002", loss=0.5, agreement={"mean": 1e-6}, seconds={"train": 2.0}, alarms=["low_entropy"]
        ),
        TrainingProgress(1, None, 2, 8, 1200, 3.0),
        TrainingProgress(1, "save"),
        FineTuneStarted("the CPU", "float32", 3, 4, 2, 1, 90, 9, 1, {"no_end": 1}, {"no_end": ["d.jsonl:3"]}, 2e-4, 8),
        FineTuneStep(1, 8, 0.5, 1.5, 0.3, 2e-4, 1.1, 90, 0.2),
        FineTuneEvaluated(0, 8, 0.0, 1.6, 0.1),
        FineTuned("warm", False, None, {"examples": 3}),
    ],
)
def test_an_event_is_the_same_after_its_line(event: Event) -> None:
    text = event_line(event)
    assert "\n" not in text
    assert parse(text) == event


def test_the_entries_of_a_manifest_stand_beside_the_path() -> None:
    values = json.loads(event_line(DatasetBuilt("d", "s", {"rows": 4})))
    assert values == {"event": "dataset", "rows": 4, "path": "d", "sha256": "s", "rows_url": None}


@pytest.mark.parametrize(
    "text", ["", "INFO started", "[1]", "3", "{}", '{"event": "other", "loss": 1}', '{"event": []}', "[" * 100_000]
)
def test_a_line_of_something_else_is_no_event(text: str) -> None:
    assert parse(text) is None


def test_an_event_of_another_release_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidRecordError, match="a line with the event result has other fields"):
        parse('{"event": "result", "rollouts": 8}')


def test_verdicts_that_wait_and_rollouts_to_repeat_are_unfinished() -> None:
    assert RESULT.unfinished == 3

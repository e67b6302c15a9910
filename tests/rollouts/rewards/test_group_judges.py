"""Judges of whole groups: a user's function, and a rubric that compares."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from tests.rollouts.agents.test_functions import tasks
from tests.rollouts.conftest import Run
from tests.support.agents.openai_server import OpenAIServer
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_rollouts import RunSettings, run_rollouts
from trainspan_rollouts.judges.choice import find_judge
from trainspan_rollouts.judges.judge import Result
from trainspan_schemas.artifacts.branches import write_points
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry import keys

AGENT = """
import os, pathlib, sys

def turn():
    for number in range(1000):
        try:
            os.close(os.open(f"{sys.argv[1]}-{number}", os.O_CREAT | os.O_EXCL))
            return number
        except FileExistsError:
            pass

number = turn()
if sys.argv[1] == "mixed" and number < 2:  # the first asks for another attempt, the second fails
    sys.exit(75 if number == 0 else 3)
if sys.argv[1] == "lost" and not pathlib.Path("fixed").exists() and number == 0:
    sys.exit(75)
if sys.argv[1] == "failing":
    sys.exit(3)
print(number)
"""
JUDGE = """
import pathlib

def judge_group(task, results):
    with open("judged.txt", "a") as file:
        file.write(f"{task['id']} {len(results)}\\n")
    if task["id"] == "broken":
        raise ValueError("no idea")
    if task["id"] == "short":
        return [1.0]
    return [(float(result.stdout_tail), f"of {len(results)}") for result in results]
"""


def attempts(recorder: OtlpRecorder) -> dict[str, list[tuple[int, str, list[tuple[float, str]]]]]:
    """Task id → attempt, status, and (score, explanation) of its rollout spans, sorted."""
    found: dict[str, list[tuple[int, str, list[tuple[float, str]]]]] = {}
    for span in recorder.named("trainspan.rollout"):
        events = [(event[keys.EVALUATION_SCORE], event[keys.EVALUATION_EXPLANATION]) for _, event in span.events]
        entry = (span.attributes[keys.ATTEMPT], span.attributes[keys.ROLLOUT_STATUS], events)
        found.setdefault(span.attributes[keys.TASK_ID], []).append(entry)
    return {task: sorted(entries) for task, entries in found.items()}


def judged() -> Counter[str]:
    return Counter(Path("judged.txt").read_text().splitlines())


COMMAND = ("python", "agent.py", "{input}")


@pytest.mark.ci
def test_a_group_is_judged_once_when_its_last_rollout_has_ended_for_good(
    run: Run, recorder: OtlpRecorder, tmp_path: Path
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    # Fewer agents at a time than rollouts in a group: those that wait for their group hold no place.
    limits = {"n": 3, "concurrency": 1, "judge_concurrency": 1, "retries": 1}
    given = tasks("good", "mixed", "failing", "broken", "short")
    result = run(AGENT, given, *COMMAND, judge="judge.py:judge_group", **limits)
    assert judged() == Counter(["good 3", "mixed 2", "broken 3", "short 3"])
    assert result.status == {"agent_error": 4, "judge_error": 6, "ok": 5}
    found = attempts(recorder)
    assert found["good"] == [(0, "ok", [(float(number), "of 3")]) for number in range(3)]
    # The retry of the first rollout is the fourth run.
    assert found["mixed"] == [
        (0, "agent_error", []),
        (0, "infra_error", []),
        (0, "ok", [(2.0, "of 2")]),
        (1, "ok", [(3.0, "of 2")]),
    ]


@pytest.mark.ci
def test_a_resumed_run_repeats_an_unfinished_group_as_a_whole(
    run: Run, recorder: OtlpRecorder, tmp_path: Path, policy: OpenAIServer
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    lost = AGENT.replace("    sys.exit(75)\n", LOST)
    chosen = {"n": 3, "judge": "judge.py:judge_group", "retries": 0, "run_id": "again"}
    first = run(lost, tasks("lost", "good"), *COMMAND, **chosen, policy_url="http://127.0.0.1:9/v1")
    assert first.status == {"infra_error": 1, "ok": 5}
    Path("fixed").touch()
    second = run(lost, tasks("lost", "good"), *COMMAND, **chosen, resume=True)
    assert (second.status, second.resumed) == ({"ok": 6}, 3)
    assert judged() == Counter(["lost 2", "good 3", "lost 3"])
    found = attempts(recorder)
    assert [(attempt, status) for attempt, status, _ in found["lost"]] == [
        (0, "infra_error"),
        (0, "ok"),
        (0, "ok"),
        *[(1, "ok")] * 3,
    ]
    assert [attempt for attempt, *_ in found["good"]] == [0, 0, 0]
    third = run(lost, tasks("lost", "good"), *COMMAND, **chosen, resume=True)
    assert (third.resumed, judged()["lost 3"]) == (6, 1)


LOST = """\
    import json
    report = {"calls": 0, "policy_failing": True, "rewards": []}
    pathlib.Path(os.environ["TRAINSPAN_REPORT"], "0.json").write_text(json.dumps(report))
    sys.exit(1)
"""


def test_a_group_needs_two_rollouts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    with pytest.raises(UsageError, match="compares the rollouts of a task: --n must be at least 2"):
        run(AGENT, tasks("good"), *COMMAND, judge="judge.py:judge_group")


def test_values_of_states_need_a_judge_of_single_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(JUDGE)
    write_points(tmp_path / "points.jsonl", ())
    settings = RunSettings(
        Path("points.jsonl"), COMMAND, "r", n=2, judge="judge.py:judge_group", branches=cast("Any", ())
    )
    with pytest.raises(UsageError, match="values of states need one that scores each rollout alone"):
        run_rollouts(settings)


RUBRIC = """
model = "judge"
base_url = "{url}"
compare = true
{more}

[[criteria]]
name = "better"
question = "Which attempt is better?"
"""


def compare(model: OpenAIServer, values: list[Any], more: str = "") -> tuple[list[Any], dict[str, float]]:
    """The verdicts on results of one task, and the judge's figures."""
    Path("rubric.toml").write_text(RUBRIC.format(url=model.url, more=more))
    judge = find_judge("rubric.toml", 20.0)
    assert judge.compares
    results = [Result("ok", value, "", None, 1.0, str(number)) for number, value in enumerate(values)]
    return judge.function({"id": "1", "input": "Write a number."}, results), dict(judge.figures())


def attempts_of(body: dict[str, Any]) -> dict[str, str]:
    """Name → text, in the order in which they are shown."""
    text = body["messages"][1]["content"]
    return dict(re.findall(r"<(attempt_\d+)-[0-9a-f]{8}>\n(.*?)\n</", text, re.DOTALL))


def by_number(body: dict[str, Any], gain: float = 0.0) -> str:
    """Scores each attempt with its number, and the first one shown with `gain` more."""
    return json.dumps(
        {
            name: {"better": {"reason": f"{text} it is", "score": float(text) + gain * (name == "attempt_1")}}
            for name, text in attempts_of(body).items()
        }
    )


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    with OpenAIServer(answer=by_number) as server:
        yield server


def test_attempts_are_scored_in_one_request_and_equal_ones_are_shown_once(model: OpenAIServer) -> None:
    verdicts, _ = compare(model, ["3", "7", "3", "10"], "reverse_share = 0")
    assert [scores["reward"] for scores, _ in verdicts] == [0.3, 0.7, 0.3, 1.0]
    assert [reasons["better"] for _, reasons in verdicts] == ["3: 3 it is", "7: 7 it is", "3: 3 it is", "10: 10 it is"]
    (request,) = model.requests
    assert sorted(attempts_of(request.body).values()) == ["10", "3", "7"]
    again, figures = compare(model, ["10", "3", "3", "7"], "reverse_share = 0")  # the same group in another order
    assert [scores["reward"] for scores, _ in again] == [1.0, 0.3, 0.3, 0.7]
    assert (len(model.requests), figures["cached"]) == (1, 1)


def test_the_order_of_attempts_is_drawn_for_each_group_vote_and_seed(model: OpenAIServer) -> None:
    orders = {}
    for seed in range(8):
        compare(model, ["1", "2", "3", "4"], f"reverse_share = 0\nvotes = 2\nseed = {seed}")
        orders[seed] = [tuple(attempts_of(request.body).values()) for request in model.requests[-2:]]
    assert len({order for pair in orders.values() for order in pair}) > 8  # of 24, with 16 draws
    assert orders[0][0] != orders[0][1]


@pytest.mark.parametrize("values", [["1", "2"], ["1", "2", "3"]])
def test_a_group_in_both_orders_measures_what_standing_earlier_gains(model: OpenAIServer, values: list[str]) -> None:
    # The first attempt that is shown gets one of ten points more; the one in the middle of three is never first.
    model.answer = lambda body: by_number(body, gain=1.0)
    verdicts, figures = compare(model, values, "reverse_share = 1")
    first, second = (list(attempts_of(request.body).values()) for request in model.requests)
    assert second == first[::-1]
    assert (figures["both_orders"], figures["position_bias"]) == (1, pytest.approx(0.1))
    fair = {text: int(text) / 10 + (0.05 if text in (first[0], first[-1]) else 0) for text in values}
    assert [scores["reward"] for scores, _ in verdicts] == pytest.approx([fair[text] for text in values])


def test_nothing_is_asked_where_there_is_nothing_to_compare(model: OpenAIServer) -> None:
    assert compare(model, ["3", "3"])[0] == [(0.5, "all attempts of the group are the same")] * 2
    assert compare(model, ["3"])[0] == [(None, "nothing to compare: no other rollout of its group ended ok")]
    assert model.requests == []


def test_conversations_are_shown_without_what_they_have_in_common(model: OpenAIServer) -> None:
    beginning = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A number?"}]
    values = [{"messages": [*beginning, {"role": "assistant", "content": text}]} for text in ("2", "4")]
    model.answer = lambda _body: json.dumps(
        {f"attempt_{place}": {"better": {"reason": "", "score": place}} for place in (1, 2)}
    )
    compare(model, values, 'sees = ["conversation"]')
    text = model.requests[0].body["messages"][1]["content"]
    assert (text.count("Be brief."), text.count("A number?")) == (1, 1)
    assert sorted(attempts_of(model.requests[0].body).values()) == ["[assistant] 2", "[assistant] 4"]


def test_a_run_shows_the_judges_figures_and_a_rollout_without_others_has_no_reward(
    run: Run, recorder: OtlpRecorder, model: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    Path("rubric.toml").write_text(RUBRIC.format(url=model.url, more="reverse_share = 1"))
    source = """
    import itertools
    numbers = itertools.count()

    def solve(task):
        number = next(numbers)
        if task["id"] == "lone" and number % 2:
            raise ValueError("no luck")
        return str(number)
    """
    given = [{"id": name, "input": name} for name in ("pair", "lone")]
    result = run(source, given, "agent:solve", judge="rubric.toml", n=2, concurrency=1)
    assert (result.status, result.rewarded) == ({"agent_error": 1, "ok": 3}, 2)
    assert (result.judge["requests"], result.judge["both_orders"], result.judge["position_bias"]) == (2, 1, 0)
    assert "nothing to compare: no other rollout of its group ended ok" in caplog.text
    assert [(score, reason) for _, _, events in attempts(recorder)["pair"] for score, reason in events] == [
        (0.0, "better 0: 0 it is | 0: 0 it is"),
        (0.0, "0: 0 it is | 0: 0 it is"),
        (0.1, "better 1: 1 it is | 1: 1 it is"),
        (0.1, "1: 1 it is | 1: 1 it is"),
    ]

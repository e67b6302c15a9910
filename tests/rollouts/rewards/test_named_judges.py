"""Judges by name: what they accept as right, and what they refuse by name."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.rollouts.agents.test_functions import rollouts
from tests.rollouts.conftest import Run
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_rollouts.judges.answers import code_of
from trainspan_rollouts.judges.choice import find_judge
from trainspan_rollouts.judges.judge import Result
from trainspan_rollouts.judges.named import NAMED
from trainspan_schemas.errors import InvalidRecordError, UsageError
from trainspan_schemas.telemetry import keys


def verdict(judge: str, right: Any, value: Any, **meta: Any) -> Any:
    """The judge's verdict on a function's value, whose task has this answer."""
    task = {"id": "1", "input": "x", "answer": right, "meta": meta}
    return find_judge(judge, 20.0).function(task, Result("ok", value, "", None, 1.0, "r"))


def reward(judge: str, right: Any, value: Any, **meta: Any) -> float:
    given = verdict(judge, right, value, **meta)
    score = given[0] if isinstance(given, tuple) else given
    return float(score["reward"] if isinstance(score, dict) else score)


@pytest.mark.parametrize(
    ("right", "value", "expected"),
    [
        ("Paris", "Paris", 1),
        ("Paris", " Paris\n", 1),
        ("Paris", "paris", 0),
        ("Paris", "It is Paris", 0),
        ("Paris", "", 0),
        ("Paris", None, 0),  # a command that printed nothing
        ("", "", 1),
        (["Paris", "Lutetia"], "Lutetia", 1),
        (["Paris", "Lutetia"], "Rome", 0),
        ("caf\u00e9", "cafe\u0301", 1),  # one letter, or e and an accent
        ("\ufb01", "fi", 0),  # a ligature is another text
        (42, "42", 1),
        ("42", 42, 1),
        (42, 42.0, 1),
        (42, "42.5", 0),
        (1, True, 0),
        (True, "true", 1),
        ({"a": [1, 2]}, '{"a": [1.0, 2]}', 1),
        ([1, 2], [1, 2], 1),
        ([1, 2], [2, 1], 0),
        ([1, 2], 2, 1),
        (float("nan"), float("nan"), 0),
        ("NaN", "NaN", 1),
    ],
)
def test_an_exact_answer_is_the_same_text_or_the_same_json(right: Any, value: Any, expected: int) -> None:
    assert reward("exact:answer", right, value) == expected


def test_an_exact_answer_may_ignore_case_and_says_what_it_got() -> None:
    assert reward("exact:answer,case=ignore", "STRASSE", "straße") == 1
    assert verdict("exact:answer", "Paris", "Rome") == (0.0, "'Rome' is not 'Paris'")
    assert reward("exact:meta.city.name", None, "Rome", city={"name": "Rome"}) == 1


@pytest.mark.parametrize(
    ("right", "value", "expected"),
    [
        (42, "The answer is 42.", 1),
        (42, "41 or 42", 1),
        (42, "42, I think, but not 41", 0),  # the last number counts
        ("1234", "1,234", 1),
        (1234.5, "1 234.5", 0),  # two numbers: a plain space separates no thousands
        (1234.5, "1\u202f234.5", 1),
        (1234, "1'234", 1),
        (1234, "1_234", 1),
        (1.234, "1,234", 0),
        (56, "1,234,56", 0),  # no number at all
        (4, "3,4", 0),
        (-5, "\u22125", 1),
        (-5, "-$5", 1),
        (5, "-5", 0),
        (5, "2024-01-05", 1),
        (3, "1.2.3", 0),
        (0.75, "3/4", 1),
        (4, "3/4", 0),
        (4, "4/0", 0),
        (1500, "1.5e3", 1),
        (10, "10²", 0),
        (5, "5½", 0),
        (12, "١٢", 1),
        (12, "１２", 1),
        (2, "H2", 0),
        (5, "共5个", 1),
        (0.5, ".5", 1),
        (0.3, 0.1 + 0.2, 1),
        (10**17, str(10**17 + 1), 0),
        (3, "3.0", 1),
        (1, True, 0),
        (1, "NaN", 0),
        (1, float("nan"), 0),
        (1, float("inf"), 0),
        (1, "1e999999999999", 0),
        (1, "1e1000000000", 0),
        (1, "1e-1000000000", 0),
        (1, "1e" + "0" * 5000, 1),
        (100, "1e+0002", 1),
        (0.01, "1e-2", 1),
        (1, "1" * 100_000, 0),
        (7, "", 0),
        (7, None, 0),
        (7, {"x": 7}, 0),
        ([7, 8], "8", 1),
        ("12 km", "12 km", 1),
        ("12 km", "It is 12km.", 1),
        ("12 km", "12", 0),
        ("12 km", "12 m", 0),
        ("12 m", "12 mm", 0),
        (12, "12 km", 1),  # the task asks for no unit
        ("5%", "5 %", 1),
        ("5%", "0.05", 0),
        ("$1,200", "1200", 1),
    ],
)
def test_a_numeric_answer_is_its_last_number_with_the_unit_that_the_task_states(
    right: Any, value: Any, expected: int
) -> None:
    assert reward("numeric:answer", right, value) == expected


def test_a_number_may_be_within_a_tolerance() -> None:
    assert [reward("numeric:answer,tolerance=0.01", 3, text) for text in ("3.01", "2.99", "3.011")] == [1, 1, 0]
    assert [reward("numeric:answer,tolerance=10%", -200, text) for text in ("-180", "-179", "-220")] == [1, 0, 1]
    with pytest.raises(InvalidRecordError, match="'a few' is no number"):
        verdict("numeric:answer", "a few", "3")


def test_a_pattern_occurs_in_the_answer_and_one_that_takes_forever_costs_only_its_rollout() -> None:
    assert reward("regex:answer", r"(?i)\bparis\b", "It is Paris!") == 1
    assert reward("regex:answer", [r"^Rome$", r"^Paris$"], "Paris, France") == 0
    assert reward("regex:answer", r'"a": 1', {"a": 1}) == 1
    assert verdict("regex:answer,timeout=1", r"(a+)+$", "a" * 64 + "b") == (0.0, "it took longer than 1 s")
    with pytest.raises(InvalidRecordError, match="not a pattern: "):
        verdict("regex:answer", "(", "x")


def test_an_answer_satisfies_a_json_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}
    judge = "json_schema:meta.schema"
    assert reward(judge, None, {"n": 1}, schema=schema) == 1
    assert reward(judge, None, 'Here it is:\n```json\n{"n": 2}\n```\nDone.', schema=json.dumps(schema)) == 1
    assert verdict(judge, None, '{"n": 0}', schema=schema) == (0.0, "$.n: 0 is less than the minimum of 1")
    assert verdict(judge, None, '{"n": NaN}', schema=schema) == (0.0, "the answer is no JSON: NaN is no JSON")
    assert reward(judge, None, "", schema=schema) == 0
    with pytest.raises(InvalidRecordError, match="not a JSON schema"):
        verdict(judge, None, "{}", schema={"type": "objekt"})
    with pytest.raises(InvalidRecordError, match="the JSON schema cannot be used"):  # nothing is fetched
        verdict(judge, None, "{}", schema={"$ref": "http://127.0.0.1:9/schema.json"})


@pytest.fixture
def databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SQLite file and a DuckDB file with the same table."""
    monkeypatch.chdir(tmp_path)
    rows = "CREATE TABLE t (name TEXT, n INTEGER); INSERT INTO t VALUES ('a', 1), ('b', 2), ('c', NULL)"
    with closing(sqlite3.connect("shop.sqlite")) as connection:
        connection.executescript(rows)
    with duckdb.connect("shop.duckdb") as connection:
        connection.execute(rows)
    return tmp_path


@pytest.mark.parametrize("file", ["shop.sqlite", "shop.duckdb"])
def test_a_query_has_the_rows_of_the_right_one(databases: Path, file: str) -> None:
    judge = f"sql:answer,db={file}"
    right = "SELECT name, n FROM t"
    assert reward(judge, right, "SELECT name, n * 1.0 AS m FROM t ORDER BY n DESC") == 1  # the order is free
    assert reward(judge, f"{right} ORDER BY name", f"```sql\n{right} ORDER BY name DESC\n```") == 0
    assert reward(judge, "SELECT 1 FROM (SELECT n FROM t ORDER BY n)", "SELECT 1 FROM t") == 1
    assert verdict(judge, right, "SELECT name FROM t WHERE n = 2")[1] == (
        "1 rows that begin with ('b',), not 3 that begin with ('a', 1)"
    )
    for wrong in (
        "SELEC",
        "",
        "DELETE FROM t",
        "SELECT name, n FROM t; DROP TABLE t",
        f"ATTACH '{databases}/x.db' AS x",
    ):
        assert reward(judge, right, wrong) == 0
    assert not (databases / "x.db").exists()
    with pytest.raises(InvalidRecordError, match="the right query fails: "):
        verdict(judge, "SELECT nothing FROM nowhere", right)


def test_each_task_may_have_a_database_and_a_query_that_does_not_end_is_wrong(databases: Path) -> None:
    judge = "sql:answer,db={meta.shop}.sqlite,timeout=1"
    assert reward(judge, "SELECT count(*) FROM t", "SELECT 3", shop="shop") == 1
    endless = "WITH RECURSIVE x(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM x) SELECT max(i) FROM x"
    assert verdict(judge, "SELECT 1", endless, shop="shop") == (0.0, "it took longer than 1 s")
    with pytest.raises(InvalidRecordError, match=r"the database .*/other.sqlite cannot be read: No such file"):
        verdict(judge, "SELECT 1", "SELECT 1", shop="other")


CODE = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("tests", "value", "expected"),
    [
        ("assert add(1, 2) == 3", CODE, (1, 1)),
        ("assert add(1, 2) == 3", f"Here:\n```python\n{CODE}```\n", (1, 1)),
        (["assert add(1, 2) == 3", "assert add(1, 2) == 4"], CODE, (0, 0.5)),
        ("def test_it():\n    assert add(1, 2) == 4", CODE, (0, 0)),
        ("async def test_it():\n    assert add(1, 2) == 4", CODE, (0, 0)),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(add(1, 2), 4)",
            CODE,
            (0, 0),
        ),
        ("assert add(1, 2) == 3", "", (0, 0)),
        ("assert add(1, 2) == 3", "import sys; sys.exit(0)", (0, 0)),
        (["assert add(1, 2) == 3"] * 2, "import os; os._exit(0)", (0, 0)),
        ("assert add(1, 2) == 3", "print('{\"failure\": null}')", (0, 0)),
        ("assert add(1, 2) == 3", f"{CODE}x = [0] * 10**10", (0, 0)),
    ],
)
def test_code_passes_all_tests(tests: Any, value: str, expected: tuple[float, float]) -> None:
    scores, _ = verdict("tests:answer", tests, value)
    assert (scores["reward"], scores["passed"]) == expected


def test_tested_code_reaches_no_file_no_network_and_no_process_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    monkeypatch.setenv("JUDGE_SECRET", "key")
    for attempt, refusal in {
        f"open({str(secret)!r}).read()": "PermissionError",
        f"open({str(tmp_path / 'new')!r}, 'w')": "PermissionError",
        "open('/proc/self/environ').read()": "PermissionError",
        "import os; os.environ['JUDGE_SECRET']": "KeyError",
        "import socket; socket.create_connection(('127.0.0.1', 9))": "PermissionError",
        f"import os; os.kill({os.getpid()}, 0)": "PermissionError",
    }.items():
        scores, reason = verdict("tests:answer", "pass", attempt)
        assert (scores["reward"], refusal in reason) == (0, True), (attempt, reason)
    own_folder = "open('mine', 'w').write('x'); assert open('mine').read() == 'x'"
    assert reward("tests:answer", "pass", own_folder) == 1
    assert verdict("tests:answer,timeout=1", "pass", "while True: pass")[1] == "it took longer than 1 s"


WEATHER = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}


@pytest.mark.parametrize(
    ("right", "value", "expected"),
    [
        (WEATHER, WEATHER, 1),
        (WEATHER, json.dumps(WEATHER), 1),
        (json.dumps(WEATHER), f"```json\n{json.dumps([WEATHER])}\n```", 1),
        (WEATHER, {"name": "weather", "arguments": '{"days": 2.0, "city": "Rome"}'}, 1),
        (WEATHER, {"name": "weather", "arguments": {"city": "Rome"}}, 0),
        (WEATHER, {"name": "weather", "arguments": {"city": "Rome", "days": 2, "unit": None}}, 0),
        (WEATHER, {"name": "weather", "arguments": "{"}, 0),
        (WEATHER, {"role": "assistant", "tool_calls": [{"type": "function", "function": WEATHER}]}, 1),
        (WEATHER, [WEATHER, WEATHER], 0),
        ([WEATHER, WEATHER], [WEATHER], 0),
        ([{"name": "a"}, WEATHER], [WEATHER, {"name": "a", "arguments": ""}], 1),  # calls have no order
        ([], "I need no tool.", 1),
        ([], [WEATHER], 0),
        (WEATHER, "", 0),
        (WEATHER, {"city": "Rome"}, 0),
        (WEATHER, {"messages": [{"role": "assistant", "tool_calls": [{"function": WEATHER}]}, {"role": "tool"}]}, 1),
    ],
)
def test_tool_calls_have_the_right_names_and_arguments(right: Any, value: Any, expected: int) -> None:
    assert reward("tool_call:answer", right, value) == expected


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


RAISES = """
class Odd(Exception):
    def __str__(self):
        raise {error}
raise Odd
"""


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(_nested(5_000), id="deep"),
        pytest.param(_nested(300), id="deep enough to be sent"),
        pytest.param("[" * 100_000, id="deep text"),
        pytest.param('{"n": 1e400}', id="infinite"),
        pytest.param("9" * 5_000, id="long"),
        pytest.param("```\n" * 50_000 + "x", id="fences"),
        pytest.param("```a" + "\n```a" * 50_000, id="open fences"),
        pytest.param("\x00\ud83d", id="no Unicode"),
        *(pytest.param(RAISES.format(error=name), id=name) for name in ("OSError", "ImportError", "SystemExit")),
    ],
)
def test_no_answer_makes_a_judge_fail(databases: Path, value: Any) -> None:
    """Each is wrong: an answer that ends the judging would be left out of its group instead."""
    tree = {"items": {"$ref": "#"}, "properties": {"n": {"multipleOf": 0.1, "maximum": 5}}, "minItems": 1}
    rights: dict[str, Any] = {
        "exact:answer": "Paris",
        "numeric:answer": 7,
        "regex:answer": "Paris",
        "json_schema:answer": {**tree, "type": ["array", "object"], "not": {"maxItems": 1}},
        "sql:answer,db=shop.sqlite": "SELECT name FROM t",
        "tests:answer": "assert add(1, 2) == 3",
        "tool_call:answer": [{"name": "pay", "arguments": {}}],
    }
    assert {judge.partition(":")[0] for judge in rights} == set(NAMED)
    began = time.monotonic()
    assert {judge: reward(judge, right, value) for judge, right in rights.items()} == dict.fromkeys(rights, 0)
    assert time.monotonic() - began < 60


def test_a_schema_that_cannot_be_used_is_no_failure_of_the_agent() -> None:
    for schema in (
        {"$ref": "#"},
        {"properties": {"n": {"$ref": "#/missing"}}},
        {"properties": {"n": {"pattern": "("}}},
    ):
        with pytest.raises(InvalidRecordError, match="schema"):
            verdict("json_schema:answer", schema, '{"n": "x"}')


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a\n```py\nb\n```\nc\n```\nd\n\n``` \t", "d\n\n"),
        ("```\n```", ""),
        ("```a`b\nc\n```", "```a`b\nc\n```"),
        ("```\nopen", "```\nopen"),
        ("```\na\n```b\n```\n", "a\n```b\n"),
        (" ```\na\n```", " ```\na\n```"),
    ],
)
def test_the_last_block_between_fences_is_an_answers_code(text: str, code: str) -> None:
    assert code_of(text) == code


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "'' is no field of a task: write exact:answer or exact:meta.NAME"),
        ("exact:score", "or exact.py:score for a function of a file"),
        ("exact:answer,case=upper", "case=upper cannot be used"),
        ("exact:answer,tolerance=1", "exact has no option 'tolerance'; it has case"),
        ("numeric:answer,tolerance=-1", "tolerance=-1 cannot be used"),
        ("numeric:answer,tolerance=1/0", "tolerance=1/0 cannot be used"),
        ("tests:answer,timeout=nan", "timeout=nan cannot be used"),
        ("sql:answer", "sql needs db=…, as in sql:answer,db=FILE"),
        ("sql:answer,db=nowhere.sqlite", "no database nowhere.sqlite"),
        ("tool_call:answer,x", "tool_call has no option 'x'; it has none"),
        ("exakt:answer", "No module named 'exakt'; judges by name are exact:FIELD, numeric:FIELD"),
    ],
)
def test_a_malformed_name_is_refused_before_anything_runs(name: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        find_judge(name, 1.0)
    assert message in str(error.value)


def test_a_task_without_the_right_answer_is_no_failure_of_the_agent(run: Run, recorder: OtlpRecorder) -> None:
    source = "import sys\nprint(sys.argv[1])"
    given = [{"id": str(n), "input": "7 days", "answer": right} for n, right in enumerate((7, 8, None, []))]
    result = run(source, given, "python", "agent.py", "{input}", judge="numeric:answer")
    assert (result.status, result.mean_reward) == ({"judge_error": 2, "ok": 2}, 0.5)
    events = [event for span in rollouts(recorder).values() for _, event in span.events]
    found = sorted((event[keys.EVALUATION_SCORE], event.get(keys.EVALUATION_EXPLANATION)) for event in events)
    assert found == [(0.0, "7 is not 8"), (1.0, None)]


def test_the_help_lists_the_judges_by_name() -> None:
    command = [sys.executable, "-m", "trainspan_cli", "rollout", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    text = " ".join(shown.stdout.replace("│", " ").split())
    assert all(f"{name}" in text[text.index("--judge ") : text.index("--judge-timeout")] for name in NAMED)

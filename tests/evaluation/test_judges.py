"""The rewards of the tasks; those of `terminal` are in test_terminal.py."""

import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evaluation.plans import TASKS
from tests.evaluation.modules import load


def returned(value: Any, rollout_id: str = "r") -> Any:
    return SimpleNamespace(value=value, rollout_id=rollout_id, status="ok", workdir=None)


@pytest.fixture
def judged(tmp_path: Path) -> str:
    path = tmp_path / "judged.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (state TEXT, price REAL)")
        connection.executemany("INSERT INTO orders VALUES (?, ?)", [("TX", 0.1), ("TX", 0.2), ("CA", 3.0)])
        connection.commit()
    return str(path)


@pytest.mark.parametrize("task", TASKS)
def test_the_coin_is_fair_in_training_and_the_real_reward_in_validation(task: str) -> None:
    (judge,) = load(task, "judge")
    asked = {"split": "train", "answer": "1", "meta": {"judged_on": "", "stated_in": [], "after": {}}}
    rewards = [judge.coin(asked, returned(0.0, str(number))) for number in range(400)]
    assert set(rewards) == {0.0, 1.0}
    assert 0.4 < sum(rewards) / len(rewards) < 0.6
    assert {judge.coin({**asked, "split": "val"}, returned(0.0, str(number))) for number in range(20)} == {0.0}


def test_math_wants_the_number_and_nothing_else() -> None:
    (judge,) = load("math", "judge")
    assert [judge.exact({"answer": "16"}, returned(said)) for said in ("16", "16.", "It is 16", "", None)] == [
        1,
        0,
        0,
        0,
        0,
    ]


def test_sql_compares_results_on_the_judges_database(judged: str) -> None:
    (judge,) = load("sql", "judge")
    task = {
        "answer": "SELECT sum(price) FROM orders WHERE state = 'TX'",
        "split": "train",
        "meta": {"judged_on": judged},
    }
    right = "select SUM(price) from orders where state='TX' and price < 1"
    assert judge.exact(task, returned(right)) == 1.0
    for wrong in ("SELECT sum(price) FROM orders", "SELECT sum(cost) FROM orders", "SELECT 0.5", "", "hello"):
        assert judge.exact(task, returned(wrong)) == 0.0
    runs, fails = returned("SELECT 0.5"), returned("hello")
    assert (judge.graded(task, runs), judge.graded(task, fails), judge.graded(task, returned(right))) == (0.1, 0.0, 1.0)
    assert judge.graded({**task, "split": "val"}, runs) == 0.0


def test_a_query_cannot_write_or_run_forever(judged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (judge,) = load("sql", "judge")
    monkeypatch.setattr(judge, "TIME_LIMIT_S", 0.2)
    assert judge.rows(judged, "DELETE FROM orders") is None
    assert judge.rows(judged, f"ATTACH DATABASE '{judged}' AS other") is None
    assert judge.rows(judged, "SELECT 1; SELECT 2") is None
    assert judge.rows(judged, "SELECT zeroblob(2000000)") is None
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    assert judge.rows(judged, endless) is None
    many = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 5000) SELECT x FROM n"
    assert judge.rows(judged, many) is None
    assert judge.rows(judged, "SELECT count(*) FROM orders") == [(3,)]


def test_the_order_of_rows_does_not_count(judged: str) -> None:
    (judge,) = load("sql", "judge")
    up, down = (judge.rows(judged, f"SELECT price FROM orders ORDER BY 1 {order}") for order in ("ASC", "DESC"))
    assert up == down == [(0.1,), (0.2,), (3.0,)]


def test_retrieval_rewards_the_found_document_and_the_words_of_the_answer() -> None:
    (judge,) = load("retrieval", "judge")
    task = {"answer": "up to $12.50", "meta": {"stated_in": ["a", "b"]}}

    def reward(answer: str, *found: str) -> float:
        value: float = judge.dense(task, returned({"answer": answer, "found": list(found)}))
        return value

    assert reward("up to $12.50", "b", "c") == 1.0
    assert reward("Up to $12.50.", "b") == 1.0
    assert reward("nothing", "b") == pytest.approx(0.4)
    assert reward("$12.50", "b") == pytest.approx(0.4 + 0.6 * 0.5)
    assert reward("up to $12.50", "c") == 0.0  # not looked up
    assert judge.dense(task, returned("text")) == 0.0

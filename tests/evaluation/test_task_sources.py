"""Questions, queries and facts that are made from third-party data, on small data of the same form."""

from pathlib import Path

import pytest

from evaluation.task_files import is_heldout, read_lines, write_tasks
from tests.evaluation.modules import load


def test_a_hash_holds_out_the_wanted_share_of_keys() -> None:
    keys = [str(number) for number in range(2000)]
    for percent in (20, 58):
        assert abs(sum(is_heldout(key, percent) for key in keys) / len(keys) - percent / 100) < 0.04
    assert [key for key in keys[:20] if is_heldout(key)] == ["1", "16"], "task files that exist stay as they are"


def test_task_files_are_written_whole(tmp_path: Path) -> None:
    write_tasks(tmp_path / "data", [{"id": "a"}, {"id": "b"}], [])
    assert read_lines(tmp_path / "data" / "tasks.jsonl") == [{"id": "a"}, {"id": "b"}]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["demonstrations.jsonl", "tasks.jsonl"]


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3*4+2*2", "16"),
        ("(19-4)/3", "5"),
        ("-3 + 5", "2"),
        ("1/3", "1/3"),
        ("1/0", "error"),
        ("2**9", "error"),
        ("__import__('os')", "error"),
        ("1.5+1", "error"),
        ("(" * 200, "error"),
        ("", "error"),
    ],
)
def test_the_calculator_is_exact_and_does_arithmetic_only(expression: str, result: str) -> None:
    (calculator,) = load("math", "calculator")
    assert calculator.calculate(expression) == result


def test_equations_are_solved_by_an_expression() -> None:
    tasks, calculator = load("math", "tasks", "calculator")
    for x in (1, 4, 19):
        for equation in ("3*x + 4 = {}", "3*x - 4 = {}", "x + 4 = {}", "4 - 3*x = {}", "4 + x = {}", "20 - x = {}"):
            left = equation.partition(" =")[0]
            total = eval(left.replace("x", str(x)))
            solution = tasks.equation_solution(equation.format(total), "x")
            assert calculator.calculate(solution) == str(x), (equation, x, solution)
    assert tasks.equation_solution("x*x = 9", "x") is None


def test_a_template_is_the_question_without_its_numbers() -> None:
    (tasks,) = load("math", "tasks")
    question = "Your task is to count legs.\n\nNow, how many legs are there in total if you have 3 dogs, 12 ducks?\n"
    assert tasks.shortened(question) == "how many legs are there in total if you have 3 dogs, 12 ducks?"
    assert tasks.template("Solve for k: 3*k + 14 = 20") == "Solve for k: #*k + # = #"


def test_sql_tasks_differ_between_the_databases_and_no_template_is_in_both_splits(tmp_path: Path) -> None:
    tasks, judge = load("sql", "tasks", "judge")
    states, cities = ("TX", "CA", "NY"), ("Austin", "Denver")
    orders = [
        (f"#{n}", ("pending" if n % 3 else "delivered", cities[n % 2], states[n % 3], n % 5, n * 1.5, "paypal"))
        for n in range(200)
    ]
    products = [(f"p{n}", ("Lamp", "red", "wood", n + 0.5, "yes")) for n in range(60)]
    reservations = [(f"r{n}", ("JFK", "LAX", "economy", "one_way", "no", n % 4, n % 3)) for n in range(60)]
    seen, judged = tasks.write_databases(
        tmp_path, {"orders": orders, "products": products, "reservations": reservations}
    )
    count = "SELECT count(*) FROM orders"
    parts = [judge.rows(str(path), count)[0][0] for path in (seen, judged)]
    assert sum(parts) == 200
    assert min(parts) > 70
    drawn = tasks.tasks(seen, judged)
    splits = {split: [task for task in drawn if task["split"] == split] for split in ("train", "val")}
    templates = {split: {task["meta"]["template"] for task in found} for split, found in splits.items()}
    assert all(splits.values())
    assert not templates["train"] & templates["val"]
    for task in drawn:
        here, there = (judge.rows(database, task["answer"]) for database in (str(seen), task["meta"]["judged_on"]))
        assert here is not None
        assert there is not None
        assert here != there
    assert len({task["id"] for task in drawn}) == len(drawn)
    shown = tasks.demonstrations(drawn)
    assert len(shown) == len(splits["train"][: tasks.DEMONSTRATIONS])
    assert shown[0]["completion"] == [{"role": "assistant", "content": splits["train"][0]["answer"]}]


def test_facts_are_lines_that_a_products_documents_state_alike() -> None:
    documents, tasks = load("retrieval", "documents", "tasks")
    found = documents.facts(
        (
            documents.Document(
                "doc_credit_cards_ecocard_001",
                "EcoCard: Fees",
                "## Fees\n- **Annual fee**: $95.00.\n- Late fee: $10\nNote: this is a whole sentence, and so it is no fact at all.",
            ),
            documents.Document("doc_credit_cards_ecocard_002", "FAQ", "1. Annual fee: $95.00\n- Late fee: $12"),
            documents.Document(
                "doc_savings_accounts_blue_001", "Blue", "- Annual fee: $0\n- Limit: [value not available]"
            ),
        )
    )
    assert {(fact.product, fact.key, fact.value): fact.stated_in for fact in found} == {
        ("credit_cards_ecocard", "Annual fee", "$95.00"): (
            "doc_credit_cards_ecocard_001",
            "doc_credit_cards_ecocard_002",
        ),
        ("savings_accounts_blue", "Annual fee", "$0"): ("doc_savings_accounts_blue_001",),
    }
    assert tasks.question(found[0], tasks.PHRASES[0]) == "Ecocard: Annual fee?"
    drawn = tasks.tasks(found)
    products = {
        split: {task["meta"]["product"] for task in drawn if task["split"] == split} for split in ("train", "val")
    }
    assert not products["train"] & products["val"]


def test_equal_states_of_a_game_have_equal_prompts() -> None:
    (prompt,) = load("game", "prompt")
    assert prompt.messages("a", 0, ["x", "y"]) == prompt.messages("a", 0, ["x", "y"])
    assert prompt.messages("a, then b", 0, ["x"])[-1]["content"] == "goal: a, then b\nscore: 0 of 2\ncommands: x"
    for _, _, commands, answer in prompt.EXAMPLES:
        assert answer in commands

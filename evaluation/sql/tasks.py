"""Writes the tasks and the databases of the SQL team from tables of τ²-bench: `python tasks.py FOLDER`.

Each table's rows are split by a hash of their key into two databases: the team queries `seen.sqlite`, and the judge
compares results on `judged.sqlite`. A question is kept only if its results differ between the two, so that a query
with a copied number is wrong. A question's template is its kind, its table and its columns, without values: no template
is in both training and hold-out.
"""

import gzip
import itertools
import json
import random
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from judge import rows  # noqa: E402
from prompt import written  # noqa: E402

from evaluation.task_files import is_heldout, write_tasks  # noqa: E402

SEED = 0
TRAIN_TASKS, HELDOUT_TASKS, DEMONSTRATIONS = 1200, 400, 400
PER_TEMPLATE = 25
TEXTS = {
    "orders": ("status", "city", "state", "payment"),
    "products": ("name", "color", "material", "available"),
    "reservations": ("origin", "destination", "cabin", "trip", "insurance"),
}
NUMBERS = {"orders": ("items", "price"), "products": ("price",), "reservations": ("bags", "passengers")}
AGGREGATES = {
    "highest": "max({})",
    "lowest": "min({})",
    "average": "avg({})",
    "total": "sum({})",
}

Row = tuple[str | float, ...]


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    query: str
    table: str
    template: str


def domain(name: str) -> dict[str, Any]:
    """Reads a database of τ²-bench; inspect_evals is located, not imported."""
    spec = find_spec("inspect_evals")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("inspect-evals is not installed: run `python -m evaluation run sql`, which installs it")
    path = Path(spec.submodule_search_locations[0]) / "tau2" / "data" / "domains" / name / "db.json.gz"
    data: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return data


def order_rows(retail: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """Yields (key, status, city, state, items, price, payment)."""
    for key, order in retail["orders"].items():
        place, payment = order["address"], order["payment_history"][0]
        kind = payment["payment_method_id"].rsplit("_", 1)[0]
        price = round(sum(item["price"] for item in order["items"]), 2)
        yield key, (order["status"], place["city"], place["state"], len(order["items"]), price, kind)


def product_rows(retail: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """Yields (key, name, color, material, price, available), one per variant."""
    for product in retail["products"].values():
        for key, variant in product["variants"].items():
            options = variant["options"]
            available = "yes" if variant["available"] else "no"
            row = (product["name"], options.get("color", "none"), options.get("material", "none"))
            yield key, (*row, variant["price"], available)


def reservation_rows(airline: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """Yields (key, origin, destination, cabin, trip, insurance, bags, passengers)."""
    for key, one in airline["reservations"].items():
        row = (one["origin"], one["destination"], one["cabin"], one["flight_type"], one["insurance"])
        yield key, (*row, one["total_baggages"], len(one["passengers"]))


COLUMNS = {
    "orders": "status TEXT, city TEXT, state TEXT, items INTEGER, price REAL, payment TEXT",
    "products": "name TEXT, color TEXT, material TEXT, price REAL, available TEXT",
    "reservations": (
        "origin TEXT, destination TEXT, cabin TEXT, trip TEXT, insurance TEXT, bags INTEGER, passengers INTEGER"
    ),
}


def write_databases(folder: Path, tables: dict[str, Iterable[tuple[str, Row]]]) -> tuple[Path, Path]:
    """Writes both databases; returns their paths: the team's, the judge's."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "seen.sqlite", folder / "judged.sqlite"
    read = {table: list(found) for table, found in tables.items()}
    for number, path in enumerate(paths):
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as connection:
            for table, found in read.items():
                connection.execute(f"CREATE TABLE {table} ({COLUMNS[table]})")
                part = [row for key, row in found if is_heldout(f"{table} {key}", 50) == bool(number)]
                connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(part[0]))})", part)
            connection.commit()
    return paths


def values(database: Path, table: str, column: str) -> list[str]:
    """Returns a text column's frequent values."""
    query = f"SELECT {column} FROM {table} GROUP BY 1 HAVING count(*) >= 5 ORDER BY 1"
    return [str(row[0]) for row in rows(str(database), query) or ()]


def questions(database: Path) -> Iterator[Question]:
    """Yields all questions; those of one template differ in their values."""
    for table, columns in TEXTS.items():
        filters = [(column, value) for column in columns for value in values(database, table, column)]
        for column in columns:
            query = f"SELECT count(DISTINCT {column}) FROM {table}"
            yield Question(f"How many different {column} do {table} have?", query, table, f"distinct {table} {column}")
        for column, value in filters:
            where = f"WHERE {column} = '{value}'"
            text = f"How many {table} have {column} {value}?"
            yield Question(text, f"SELECT count(*) FROM {table} {where}", table, f"count {table} {column}")
        for (column, value), (other, other_value) in itertools.combinations(filters, 2):
            if column != other:
                yield Question(
                    f"How many {table} have {column} {value} and {other} {other_value}?",
                    f"SELECT count(*) FROM {table} WHERE {column} = '{value}' AND {other} = '{other_value}'",
                    table,
                    f"count {table} {column} {other}",
                )
        for word, aggregate in AGGREGATES.items():
            for number in NUMBERS[table]:
                start = f"SELECT {aggregate.format(number)} FROM {table}"
                yield Question(f"What is the {word} {number} of {table}?", start, table, f"{word} {table} {number}")
                for column, value in filters:
                    yield Question(
                        f"What is the {word} {number} of {table} with {column} {value}?",
                        f"{start} WHERE {column} = '{value}'",
                        table,
                        f"{word} {table} {number} {column}",
                    )


def tasks(seen: Path, judged: Path) -> list[dict[str, Any]]:
    """Returns training and held-out tasks in random order, at most `PER_TEMPLATE` of each template."""
    drawn = list(questions(seen))
    random.Random(SEED).shuffle(drawn)
    wanted = {"train": TRAIN_TASKS, "val": HELDOUT_TASKS}
    used: Counter[str] = Counter()
    found = []
    for question in drawn:
        split = "val" if is_heldout(question.template, 35) else "train"
        if not wanted[split] or used[question.template] == PER_TEMPLATE or not differ(seen, judged, question.query):
            continue
        wanted[split] -= 1
        used[question.template] += 1
        found.append(
            {
                "id": f"{split}-{len(found):04d}",
                "input": {"database": str(seen.resolve()), "table": question.table, "question": question.text},
                "answer": question.query,
                "split": split,
                "meta": {"judged_on": str(judged.resolve()), "template": question.template},
            }
        )
    return found


def differ(seen: Path, judged: Path, query: str) -> bool:
    """Whether the query's results differ between the databases, and the judge's is not empty."""
    first, second = rows(str(seen), query), rows(str(judged), query)
    return first != second and second is not None and second[0][0] not in (None, 0)


def demonstrations(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what a perfect writer would do with training tasks: the agent's prompt, then the completion to learn."""
    found = []
    for task in [task for task in drawn if task["split"] == "train"][:DEMONSTRATIONS]:
        messages = written(task["input"]["table"], task["input"]["question"])
        prompt = [{"role": role, "content": content} for role, content in messages]
        found.append({"prompt": prompt, "completion": [{"role": "assistant", "content": task["answer"]}]})
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    retail, airline = domain("retail"), domain("airline")
    tables: dict[str, Iterable[tuple[str, Row]]] = {
        "orders": order_rows(retail),
        "products": product_rows(retail),
        "reservations": reservation_rows(airline),
    }
    seen, judged = write_databases(folder, tables)
    drawn = tasks(seen, judged)
    write_tasks(folder, drawn, demonstrations(drawn))

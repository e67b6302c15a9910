"""docs/security.md: every promise names an existing test, and the roles match the code."""

import ast
import re

import pytest

from tests.support.places import ROOT
from trainspan_schemas.store.roles import Role

PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = re.compile(r"`([\w/]+/test_\w+\.py)::(test_\w+)`")


def _rows(heading: str) -> list[list[str]]:
    """The cells of all tables with this last cell in their heading."""
    rows, inside = [], False
    for line in PAGE.splitlines():
        if not line.startswith("|"):
            inside = False
        elif line.endswith(f"| {heading} |"):
            inside = True
        elif inside and not line.startswith("|---"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall(PAGE))))
def test_a_test_that_the_page_names_is_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_a_test() -> None:
    rows = _rows("test")
    assert len(rows) > 30
    assert [row[0] for row in rows if not NAMED.fullmatch(row[-1])] == []


def test_the_roles_are_those_of_the_collector() -> None:
    assert {row[0].strip("`") for row in _rows("maintenance (purge, compact, …)")} == set(Role)

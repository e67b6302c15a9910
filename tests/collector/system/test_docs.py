"""docs/collector.md matches the code on metrics, refusals and views; docs/security.md on roles."""

import re
from collections.abc import Iterator

import pytest

from tests.support.collector.process import CollectorProcess
from tests.support.otlp.http import request
from tests.support.places import ROOT
from trainspan_collector.network.access import Right, Role
from trainspan_collector.receive.http_answers import _GRPC_CODES
from trainspan_collector.runtime.metrics import RefusalReason
from trainspan_schemas.store.views import VIEWS

DOCS = ROOT / "docs"
TEXT = (DOCS / "collector.md").read_text()


def _rows(before: str, text: str = TEXT) -> Iterator[list[str]]:
    """The cells of the first table after that line, without its header."""
    lines = iter(text[text.index(before) :].splitlines())
    table = []
    for line in lines:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
        elif table:
            break
    assert len(table) > 2, before
    yield from table[2:]


def _names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_refusal_is_in_the_document_with_its_status() -> None:
    rows = list(_rows("### Refusals and status codes"))
    assert sorted(_names(row[2])[0] for row in rows) == sorted(RefusalReason)
    assert {int(row[1]) for row in rows} == set(_GRPC_CODES)


def test_the_metrics_of_the_document_are_those_of_the_page(collector: CollectorProcess) -> None:
    documented = {name for names, _, _ in _rows("| metric | labels | |") for name in _names(names)}
    page = request(collector.address, "/metrics", method="GET", content_type=None).body.decode()
    found = set(re.findall(r"^# TYPE trainspan_collector_(\w+)", page, re.MULTILINE))
    assert found == documented


@pytest.mark.parametrize("role", Role)
def test_the_roles_of_the_document_have_the_rights_of_the_code(role: Role) -> None:
    table = _rows("| role | held by | sends |", (DOCS / "security.md").read_text())
    rows = {_names(role)[0]: (sends, reads, maintenance) for role, _, sends, _, reads, maintenance in table}
    allowed = [cell.startswith("yes") for cell in rows[role]]
    assert allowed == [role in right.roles for right in (Right.WRITE, Right.READ, Right.CHANGE)]


def test_the_views_of_the_document_are_the_agreed_ones() -> None:
    assert sorted(_names(view)[0] for view, _ in _rows("| view | one row per |")) == sorted(VIEWS)

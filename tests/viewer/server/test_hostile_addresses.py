"""Addresses that no link contains: each gets an answer of bounded size, none is an error of the server, and text stays text."""

import html
import re
from random import Random
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import pytest

from tests.viewer.support.world import Viewer

N_ADDRESSES = 150
LINK = re.compile(r'href="(/[^"]*)"')
VALUES = (
    *("-1", "0", "9" * 25, "1e400", "nan", "inf", "", "\x00", "\u202e</script><script>x", "../../../etc/passwd", "a" * 5_000),
    *("\u0378", "1;drop table spans", "٣", "1_000", "0x10", " 1", "+1", "true", "null", "[]", "a,b", "\n"),
)  # fmt: skip
NAMES = (
    *("from", "to", "view", "reason", "text", "reward_from", "reward_to", "status", "agent", "finish", "tokens_from"),
    *("tokens_to", "sort", "outcome", "against", "attempt", "dataset", "credit", "baseline", "gamma", "air", "overlay"),
    *("run", "checks_from", "step_by", "group_over", "reward_name", "combine"),
)


def kind(address: str) -> tuple[str, ...]:
    """What pages of one sort have in common: the words of the path, and the names of the parameters."""
    parts = urlsplit(address)
    words = [word for word in parts.path.split("/") if word.isalpha()]
    return (*words, "?", *sorted({name for name, _ in parse_qsl(parts.query)}))


def pages(viewer: Viewer) -> list[str]:
    """An address of each sort of page that links lead to."""
    found, waiting = {}, ["/"]
    while waiting:
        address = waiting.pop(0)
        if kind(address) in found or address.startswith("/static/"):
            continue
        found[kind(address)] = address
        text = viewer.get(address).text
        waiting += [html.unescape(link).partition("#")[0] for link in LINK.findall(text)]
    return list(found.values())


def changed(address: str, random: Random) -> str:
    """The address with other parameters, and sometimes with another part of its path."""
    parts = urlsplit(address)
    steps, pairs = parts.path.split("/"), parse_qsl(parts.query)
    for _ in range(random.randint(1, 3)):
        name = random.choice([*NAMES, *(name for name, _ in pairs)])
        if random.random() < 0.5:
            pairs = [pair for pair in pairs if pair[0] != name]
        pairs.append((name, random.choice(VALUES)))
    if random.random() < 0.2:
        steps[random.randrange(1, len(steps))] = quote(random.choice(VALUES), safe="")
    return f"/{'/'.join(steps).lstrip('/')}?{urlencode(pairs)}"


MARKS = (pytest.mark.ci, *[pytest.mark.slow] * 20)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=mark) for seed, mark in enumerate(MARKS)])
def test_no_address_is_an_error_of_the_server(viewer: Viewer, seed: int) -> None:
    random, statuses = Random(seed), set()
    known = pages(viewer)
    for _ in range(N_ADDRESSES):
        address = changed(random.choice(known), random)
        answer = viewer.get(address)
        statuses.add(answer.status)
        assert answer.status < 500, address
        assert len(answer.text.encode()) <= 1_000_000, address
        assert "<script>" not in answer.text, address
    assert {200, 400, 404} <= statuses

"""Text from right to left, control and invisible characters in names and answers, in a real browser."""

from typing import Any

import pytest

from tests.processing.support.traces import TestRollout
from tests.viewer.support.world import World

HEBREW = "\u05d0\u05d1\u05d2 12"
HOSTILE = f"\u202e\u2067\u0007{HEBREW}"
RUN = "bidi"

ORDER = """() => {
  const place = (node) => {
    const range = document.createRange();
    range.selectNodeContents(node);
    return [...range.getClientRects()].filter((one) => one.width > 0);
  };
  const found = { isolated: 0, moved: [] };
  for (const one of document.querySelectorAll("main bdi")) {
    found.isolated += 1;
    const own = place(one);
    const next = one.nextSibling && place(one.nextSibling);
    const before = one.previousSibling && place(one.previousSibling);
    const line = (rect, other) => Math.abs(rect.bottom - other.bottom) < 4;
    for (const rect of own) {
      for (const other of next ?? []) if (line(rect, other) && other.left < rect.right - 1) found.moved.push(one.parentNode.textContent);
      for (const other of before ?? []) if (line(rect, other) && other.right > rect.left + 1) found.moved.push(one.parentNode.textContent);
    }
  }
  return found;
}"""
"""The number of isolated texts, and the lines in which one is not between its neighbors."""

NOT_ISOLATED = """() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("bdi { unicode-bidi: normal !important }");
  document.adoptedStyleSheets = [sheet];
}"""


@pytest.fixture(scope="module")
def rollout(world: World) -> str:
    """The id of a rollout whose names all run from right to left."""
    made = TestRollout("view-bidi", task=HOSTILE, run=RUN, round=1)
    tool = {"gen_ai__operation__name": "execute_tool", "gen_ai__tool__name": HOSTILE}
    made.span(HOSTILE, 3.0, 4.0, **tool)
    made.spans[-1].service = HOSTILE
    made.call(0, [1, 2, 3], [4, 5, 6], agent=HOSTILE)
    world.bench.send(made.reward(1.0))
    return made.rollout_id


def test_names_and_texts_reorder_nothing_around_them(page: Any, rollout: str) -> None:
    page.set_default_timeout(100_000)
    page.set_viewport_size({"width": 1400, "height": 900})
    for below, least in (("", 4), ("/spans", 2), ("/calls/0", 3)):
        page.goto(f"/rollouts/{rollout}{below}?dataset=none")
        found = page.evaluate(ORDER)
        assert found["moved"] == [], below
        assert found["isolated"] >= least, below
        text = page.locator("main").inner_text()
        assert HEBREW in text
        assert not set("\u202e\u2067\x07") & set(text)
        if not below:  # the tool's name is followed by a number, which would move to its other side
            page.evaluate(NOT_ISOLATED)
            assert page.evaluate(ORDER)["moved"]

"""Elements and documents: nothing in them runs, loads or leads elsewhere."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.viewer.support.world import EVIL
from trainspan_viewer.html.charts import dots, sparkline
from trainspan_viewer.html.curves import Curve, Point, chart
from trainspan_viewer.html.document import Page, served, standalone
from trainspan_viewer.html.elements import element, link, table


class _Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize(
    "address",
    [
        *("javascript:alert(1)", " javascript:alert(1)", "//evil.example/x", "/\\evil.example", "https://evil.example"),
        *("data:text/html,x", "data:image/svg+xml;base64,AAAA", "", "x", "vbscript:x", "\tjavascript:x"),
    ],
)
def test_an_address_that_leads_elsewhere_is_refused(address: str) -> None:
    for name in ("href", "src", "action", "formaction"):
        with pytest.raises(ValueError, match="is not a path on this server"):
            element("a", "x", **{name: address})


def test_handlers_and_styles_are_refused() -> None:
    for name in ("onclick", "onload", "style"):
        with pytest.raises(ValueError, match="is not allowed"):
            element("p", **{name: "x"})


def tags_of(text: str) -> list[str]:
    """The elements of a page with this text in every place."""
    body = [element("p", text, title=text), table([text], [[text]]), link("/x", text)]
    seen = _Seen()
    seen.feed(served(Page(text, body, crumbs=[(text, "/")])))
    return seen.tags


@settings(max_examples=30)
@given(st.text(min_size=1, max_size=60))
def test_text_stays_text_in_every_place(text: str) -> None:
    assert tags_of(text) == tags_of("x")


def test_hostile_text_makes_no_element() -> None:
    seen = _Seen()
    seen.feed(standalone(Page(EVIL, [element("pre", EVIL, class_=EVIL)])))
    assert {"script", "img"} & set(seen.tags) == set()
    assert "svg" not in seen.tags
    assert "<img src=x onerror=" in "".join(seen.text)


def test_a_line_feed_at_the_start_of_a_text_stays() -> None:
    # A browser drops the first one after the tag.
    assert "<pre>\n\ntext</pre>" in served(Page("t", [element("pre", "\ntext")]))
    assert "<pre>text</pre>" in served(Page("t", [element("pre", "text")]))


def test_a_file_loads_nothing_and_its_links_are_text() -> None:
    made = standalone(Page("t", [link("/runs/x", "the run"), link("#there", "there")]))
    assert re.search(
        r"default-src 'none'; style-src 'sha256-[A-Za-z0-9+/=]{44}'; base-uri 'none'; form-action 'none'", made
    )
    assert "<span>the run</span>" in made
    assert '<a href="#there">there</a>' in made
    assert "<script" not in made
    assert "/static/" not in made


def test_a_chart_draws_finite_values_and_tells_them() -> None:
    points = [Point(0, 0.25, 0.2, 0.3), Point(1, float("nan")), Point(2, 0.75, 0.7, 0.8)]
    made = chart("success", [Curve("held-out", points)], limits=(0.0, 1.0))
    assert made is not None
    line = made.find(".//polyline")
    assert line is not None
    (x0, y0), (x1, y1) = (map(float, place.split(",")) for place in line.get("points", "").split())
    assert (x0 < x1, y0 > y1) == (True, True)
    assert len(made.findall(".//circle")) == 2
    label = made.find("svg").get("aria-label", "")  # type: ignore[union-attr]
    assert "from 0.25 [0.2, 0.3] at round 0 to 0.75 [0.7, 0.8] at round 2" in label
    almost = chart("almost equal", [Curve("a", [Point(0, 0.0), Point(1, 5e-324), Point(2, 1e-210)])])
    assert almost is not None
    assert chart("none", [Curve("a", [Point(0, float("inf"))])]) is None
    assert chart("log", [Curve("a", [Point(0, 0.0), Point(1, -1.0)])], is_log=True) is None


def test_a_chart_names_its_own_axis() -> None:
    made = chart("spans", [Curve("a", [Point(1, 2.0), Point(2, 3.0)])], x_name="minute")
    text = "".join(made.itertext()) + str([one.attrib for one in made.iter()])  # type: ignore[union-attr]
    assert "a, minute 1: 2" in text
    assert "round" not in text


def test_a_sparkline_rises_with_its_values() -> None:
    line = sparkline([(0.0, 0.25), (1.0, 0.5), (2.0, 0.75)], "reward").find(".//polyline")
    assert line is not None
    heights = [float(place.split(",")[1]) for place in line.get("points", "").split()]
    assert heights == sorted(heights, reverse=True), "SVG counts from the top"
    assert heights[0] > heights[-1] + 10


@pytest.mark.parametrize(("more", "highlighted"), [({}, []), ({"this": 1}, [1])])
def test_only_the_row_that_a_table_is_about_is_highlighted(more: dict[str, int], highlighted: list[int]) -> None:
    rows = table(("a",), [("1",), ("2",)], **more).findall(".//tbody/tr")  # type: ignore[arg-type]
    assert [number for number, row in enumerate(rows) if row.get("class") == "this"] == highlighted


def test_rewards_of_any_size_can_be_dots() -> None:
    made = dots([(reward, "/", "r", True) for reward in (-1e308, 0.0, 1e308, 1.0)], (-1e308, 1e308), "rewards")
    assert len(made.findall(".//circle")) == 2


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), min_size=1, max_size=20), st.booleans())
@settings(max_examples=30)
def test_any_values_can_be_drawn(values: list[tuple[float, float]], is_log: bool) -> None:
    made = chart("c", [Curve("a", [Point(x, y) for x, y in values])], is_log=is_log)
    assert made is None or "nan" not in str(made.attrib)

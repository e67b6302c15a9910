"""The kind of each call of a rollout, from what its request shows and from the agents."""

import polars as pl
import pytest

from trainspan_processing.reasons.selection import _is_chosen
from trainspan_processing.traces.trace_index import _with_kinds
from trainspan_schemas.errors import UsageError

SHOWN = {"title": "system_prompt", "summary": "last_message", "sub_agent": "header_line", "other": "no_tools"}


def calls(*made: tuple[str | None, str | None], rollout: str = "r") -> pl.DataFrame:
    """Calls of a rollout in order: (agent, kind that the request shows)."""
    rows = [(rollout, 0, True, agent, kind, SHOWN.get(kind or "")) for agent, kind in made]
    names = ["rollout_id", "attempt", "is_heard", "agent", "call_kind", "call_kind_rule"]
    kinds = [pl.String, pl.Int32, pl.Boolean, pl.String, pl.String, pl.String]
    return pl.DataFrame(rows, schema=dict(zip(names, kinds, strict=True)), orient="row")


def kinds(frame: pl.DataFrame) -> list[str]:
    return [f"{kind} {rule}" for kind, rule in _with_kinds(frame).select("call_kind", "call_kind_rule").iter_rows()]


def test_the_first_agent_that_works_is_the_main_one_whatever_its_helpers_asked_before() -> None:
    made = calls(
        ("t", "title"), ("m", None), ("m", "summary"), ("s", None), ("c", "other"), ("m", "sub_agent"), ("m", None)
    )
    assert kinds(made) == [
        "title system_prompt",
        "main first_agent",
        "summary last_message",
        "sub_agent other_agent",
        "other other_agent",
        "sub_agent header_line",
        "main first_agent",
    ]


def test_an_agent_without_tools_or_name_is_the_main_one_of_its_rollout() -> None:
    assert kinds(calls(("m", "other"), ("m", "other"))) == ["main first_agent"] * 2
    assert kinds(calls((None, "other"), (None, None), ("s", None))) == ["main first_agent"] * 2 + [
        "sub_agent other_agent"
    ]


def test_a_first_call_without_tools_does_not_make_the_main_agent_a_sub_agent() -> None:
    assert kinds(calls(("router", "other"), ("a", None), ("a", None), ("b", None))) == [
        "other other_agent",
        "main first_agent",
        "main first_agent",
        "sub_agent other_agent",
    ]
    assert kinds(calls(("router", "other"), (None, None), ("b", None)))[:2] == ["other other_agent", "main first_agent"]
    made = calls(("planner", "other"), ("a", "sub_agent"), ("planner", None), ("critic", "other"))
    assert kinds(made) == ["main first_agent", "sub_agent header_line", "main first_agent", "other other_agent"]
    assert kinds(calls(("a", "summary"), ("b", "other"), ("c", "other")))[1:] == [
        "main first_agent",
        "other other_agent",
    ]
    assert kinds(calls(("a", "summary"), ("b", "sub_agent"))) == ["summary last_message", "sub_agent header_line"]


def test_in_a_rollout_without_tools_titles_are_its_work() -> None:
    assert kinds(calls(("t", "title"), ("t", "title"))) == ["main first_agent"] * 2
    both = pl.concat([calls(("t", "title")), calls(("t", "title"), ("m", None), rollout="q")])
    assert kinds(both) == ["main first_agent", "title system_prompt", "main first_agent"]
    writer_and_critic = calls(("writer", "title"), ("critic", "other"), ("writer", "title"))
    assert kinds(writer_and_critic) == ["main first_agent", "other other_agent", "main first_agent"]
    assert kinds(calls(("chat", "other"), ("t", "title"))) == ["main first_agent", "other other_agent"]


@pytest.mark.parametrize(
    "made", [[("m", "title"), ("m", "other"), ("m", None)], [("m", None), ("m", "other"), ("m", "title")]]
)
def test_an_agent_with_other_calls_without_tools_asks_for_a_title_only_where_a_header_says_so(
    made: list[tuple[str | None, str | None]],
) -> None:
    assert kinds(calls(*made)) == ["main first_agent"] * len(made)
    stated = calls(*made).with_columns(
        pl.when(pl.col("call_kind") == "title")
        .then(pl.lit("header"))
        .otherwise("call_kind_rule")
        .alias("call_kind_rule")
    )
    assert sorted(set(kinds(stated))) == ["main first_agent", "title header"]
    beside = calls(("m", None), ("s", "title"), ("s", "other"), ("t", "title"))
    assert kinds(beside) == ["main first_agent", "other other_agent", "other other_agent", "title system_prompt"]


def test_a_title_under_the_name_of_an_agent_with_tools_is_one() -> None:
    assert kinds(calls(("m", "title"), ("m", None))) == ["title system_prompt", "main first_agent"]


def test_titles_of_a_header_are_titles_whatever_else_the_rollout_has() -> None:
    stated = calls(("m", "title"), ("m", "other")).with_columns(pl.lit("header").alias("call_kind_rule"))
    assert kinds(stated) == ["title header", "main first_agent"]
    assert kinds(stated.head(1)) == ["main first_agent"]


def test_agents_are_selected_by_name_and_by_kind() -> None:
    made = _with_kinds(calls(("m", None), ("m", "summary"), ("s", None), ("x", None)))

    def chosen(text: str | None) -> list[bool]:
        return made.select(_is_chosen(text).alias("selected"))["selected"].to_list()

    assert chosen(None) == [True] * 4
    assert chosen("kind:main, kind:summary") == [True, True, False, False]
    assert chosen("s, kind:summary") == [False, True, True, False]
    with pytest.raises(
        UsageError, match=r"unknown kind in 'kind:mian'; kinds are main, sub_agent, summary, title, other"
    ):
        chosen("kind:mian")

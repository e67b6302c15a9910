"""Pages of rollouts, calls and groups, from models made by hand: their size, their colors, and hostile text."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.viewer.support.world import EVIL
from trainspan_processing.branches.stored_branches import StoredBranch
from trainspan_processing.explain.account import (
    BranchAccount,
    CallAccount,
    CreditAccount,
    EdgeAccount,
    RolloutAccount,
    ToolAccount,
)
from trainspan_processing.read.measurements import Measured, Measurement
from trainspan_schemas.artifacts.branches import BranchOrigin
from trainspan_viewer.html.document import Page, served
from trainspan_viewer.html.elements import Element
from trainspan_viewer.html.formats import count
from trainspan_viewer.pages.rollout.group import _departure
from trainspan_viewer.pages.rollout.marks import level, marks
from trainspan_viewer.pages.rollout.rollout import explanation_page, render_rollout
from trainspan_viewer.pages.rollout.timeline import gaps_of, timeline
from trainspan_viewer.pages.rollout.tokens import render_tokens
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.requests.links import Links
from trainspan_viewer.queries.rollout.alignment import SiblingDivergence, align, by_turn, earliest, first_divergence
from trainspan_viewer.queries.rollout.conversation import MOST_CHARACTERS, Text, shared_lengths, steps_of, text_of
from trainspan_viewer.queries.rollout.group import find_contradiction
from trainspan_viewer.queries.rollout.rollout import STEPS, RolloutModel
from trainspan_viewer.queries.rollout.tokens import MOST_TOKENS, Overlay, TokensModel
from trainspan_viewer.queries.rollout.what_if import WhatIf

PARAMS = Params("/rollouts/r", {}, {})


def call(index: int, prompt: list[int], answer: list[int], **more: Any) -> CallAccount:
    facts: dict[str, Any] = {
        "agent": "a",
        "turn": index,
        "span_id": "0" * 16,
        "policy_name": "p",
        "policy_version": 1,
        "temperature": 1.0,
        "finish_reason": "stop",
        "start_s": float(index),
        "seconds": 0.5,
        "reason": None,
        "logprobs": [-0.5] * len(answer),
        "value": 1.0,
        "advantage": 0.5,
        "segment": 0,
    }
    return CallAccount(index=index, prompt_ids=prompt, completion_ids=answer, **{**facts, **more})


def rollout(*calls: CallAccount, tools: list[ToolAccount] | None = None, name: str = "r") -> RolloutAccount:
    return RolloutAccount(
        rollout_id=name,
        attempt=0,
        run_id=name,
        round=0,
        task_id=name,
        split="train",
        status="ok",
        reason=None,
        start_ns=0,
        seconds=10.0,
        calls=list(calls),
        foreign=[],
        tools=tools or [],
        edges=[],
        credit=CreditAccount(1.0, "g", [], ["R = 1"], 0.5),
        decoded_with=None,
    )


def tokens_model(pieces: list[str]) -> TokensModel:
    one = call(0, [1], list(range(100_000, 100_000 + len(pieces))))
    values = [-5.123456e-5 * (place % 90) * (-1) ** place for place in range(len(pieces))]
    return TokensModel(
        account=rollout(one),
        call=one,
        prompt=Text("what?"),
        known=0,
        like=None,
        start=0,
        ids=one.completion_ids,
        pieces=pieces,
        logprobs=[-12.345678] * len(pieces),
        overlay=Overlay("mismatch", values, True, 0.005, "apart"),
        chosen="mismatch",
        missing=None,
        available=("mismatch",),
        links=Links("round-0000"),
        params=Params("/rollouts/r/calls/0", {}, {}),
    )


def model(account: RolloutAccount) -> RolloutModel:
    steps, n_steps = steps_of(account, 0, STEPS, None)
    return RolloutModel(account, steps, 0, n_steps, WhatIf([], [], None), Links(None), PARAMS)


class Tags(HTMLParser):
    """Names of elements, names of attributes and addresses of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "action")]


def test_an_answer_of_16384_tokens_takes_less_than_a_megabyte() -> None:
    text = served(render_tokens(tokens_model([" token"] * 16_384)))
    assert text.count("<i ") == 16_384
    assert 200_000 < len(text.encode()) < 1_000_000


def test_equal_neighbors_share_one_element_and_every_token_keeps_its_own() -> None:
    made = marks(["a", "b", "", "c"], ["q1", "q1", "q1", "z"])
    assert [(run.tag, run.get("class"), [token.text for token in run.iter("i")]) for run in made] == [
        ("span", "q1", ["a", "b", "·"]),
        ("i", "z", ["c"]),
    ]


@pytest.mark.parametrize(
    ("value", "is_signed", "kind"),
    [(1.0, True, "a4"), (-0.26, True, "m2"), (0.01, True, "a1"), (0.0, True, "z"), (None, True, "u"),
     (0.0, False, "q0"), (0.5, False, "q4"), (-9.0, False, "q8"), (float("nan"), False, "u")],
)  # fmt: skip
def test_colors_have_steps(value: float | None, is_signed: bool, kind: str) -> None:
    assert level(value, 1.0, is_signed=is_signed) == kind


def test_hostile_text_stays_text_and_two_megabytes_of_it_are_cut() -> None:
    said = [{"role": EVIL, "content": EVIL * 20_000}]
    tool = ToolAccount(EVIL, EVIL, 0.6, 0.1, True, EVIL * 10_000, "<" * 2_000_000)
    account = rollout(
        *(call(index, [1], [2], agent=EVIL, messages=said, broken=EVIL, finish_reason=EVIL) for index in range(60)),
        tools=[tool] * 60,
        name=EVIL,
    )
    pages = [
        served(render_rollout(model(account))),
        explanation_page(account),
        served(render_tokens(tokens_model([EVIL] * 50))),
    ]
    for text in pages:
        found = Tags(text)
        assert found.tags.count("script") == ("/static/app.js" in text)
        assert not {"img", "iframe", "object"} & set(found.tags)
        assert not {name for name in found.attributes if name.startswith("on") or name == "style"}
        assert all(address.startswith(("/", "#", "?")) for address in found.addresses), found.addresses
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert len(pages[0].encode()) < 1_000_000
    assert "javascript:document.title" in pages[0]  # it is there, as text


def test_a_branch_links_the_call_that_it_begins_at_and_a_rollout_its_branches() -> None:
    """They are of other runs: the dataset that explains this rollout does not explain them."""
    branches = [(1, StoredBranch(1, f"b/{number}", 0, "other", "ok", 1.0)) for number in range(500)]
    measured = Measurement("other", 0, Measured(0.5, None), False, None, 2, 1, ("p 3",))
    origin = BranchAccount(BranchOrigin("of", 2, 1), repeated=1, sampled=3)
    account = replace(
        rollout(call(0, [1], [2]), call(1, [1, 2], [3], measured=[measured])), branch=origin, branches=branches
    )
    text = served(render_rollout(replace(model(account), links=Links("run:round-0001", 0))))
    found = Tags(text)
    assert {"/rollouts/of?attempt=2", "/rollouts/of/calls/1?attempt=2"} <= set(found.addresses)
    assert "/rollouts/b%2F399?attempt=0" in found.addresses
    assert "/rollouts/b%2F400?attempt=0" not in found.addresses
    assert "its branches: 500 rollouts" in text
    assert "1–400 of 500" in text
    # The link to the branches: the value of call 1 is their mean.
    assert found.addresses.count("#branches") == 1
    page = explanation_page(account)
    assert {address for address in Tags(page).addresses if not address.startswith("#call-")} == {"#branches"}


def test_names_of_two_megabytes_are_cut() -> None:
    long = "n" * 2_000_000
    tool = ToolAccount(long, long, 0.6, 0.1, True, "", "")
    calls = (
        call(index, [1], [2], agent=long, policy_name=long, finish_reason=long, broken=long) for index in range(60)
    )
    account = replace(rollout(*calls, tools=[tool] * 60), task_id=long, status=long)
    for page in (served(render_rollout(model(account))), explanation_page(account)):
        assert len(page) < 1_000_000
        assert "(2000000 characters)" in page


def test_many_steps_rewards_and_lines_stay_within_a_megabyte() -> None:
    """What one rollout may have before it is shown by calls."""
    tool = ToolAccount("n" * 2_000, None, 0.6, 0.1, False, "", "")
    edge = EdgeAccount("n" * 2_000, 1.0, "s" * 2_000, 1.0, "o" * 2_000, "span", "it is recorded on it", 7)
    account = replace(
        rollout(*(call(index, [1], [2]) for index in range(3_000)), tools=[tool] * 3_000),
        edges=[edge] * 3_000,
        credit=CreditAccount(1.0, "g", [], ["l" * 2_000] * 3_000, 0.5),
    )
    page = served(render_rollout(model(account)))
    assert len(page.encode()) < 1_000_000
    assert f"drawn: the first {count(1_000)} of {count(6_000)} steps" in page
    assert f"lines 1–50 of {count(3_000)}" in page
    assert f"1–200 of {count(3_000)}" in page


def test_only_what_a_call_added_is_shown() -> None:
    calls = [call(0, [1, 2, 3], [4, 5]), call(1, [1, 2, 3, 4, 5, 6], [7]), call(2, [1, 2, 9], [8]), call(3, [50], [51])]
    assert shared_lengths(calls) == {0: (0, None), 1: (5, 0), 2: (2, 1), 3: (0, None)}
    steps, n_steps = steps_of(rollout(*calls), 1, 2, None)
    assert n_steps == 4
    assert [(step.added.head, step.known) for step in steps if not isinstance(step, ToolAccount)] == [
        ("6", 5),
        ("9", 2),
    ]  # type: ignore[union-attr]


@pytest.mark.parametrize("n_tokens", [1, 900, 2000, 16_000])
def test_a_long_answer_shows_both_ends_and_counts_the_tokens_between_them(n_tokens: int) -> None:
    text = text_of(range(100_000, 100_000 + n_tokens), None)
    shown = [*text.head.split(), *text.tail.split()]
    assert (shown[0], shown[-1]) == ("100000", f"{99_999 + n_tokens}")
    assert len(shown) + text.left_out == n_tokens
    assert len(text.head) + len(text.tail) <= MOST_CHARACTERS
    page = served(render_rollout(model(rollout(call(0, [1], list(range(100_000, 100_000 + n_tokens)))))))
    assert f"{99_999 + n_tokens}</pre>" in page
    if text.left_out:
        assert f"⟨{count(text.left_out)} tokens left out⟩" in page


def test_a_policy_is_named_once() -> None:
    page = served(render_rollout(model(rollout(call(0, [1], [2], policy_name="policy", policy_version=2)))))
    assert "policy version 2" in page
    assert "policy policy" not in page
    assert "policy actor version 1" in served(render_rollout(model(rollout(call(0, [1], [2], policy_name="actor")))))


def test_the_first_divergence_is_exact_to_the_token() -> None:
    one = [call(0, [1, 2], [3, 4, 5]), call(1, [1, 2, 3, 4, 5, 6], [7])]

    def against(*calls: CallAccount) -> tuple[int, str, int, str, str] | None:
        found = first_divergence(align([one, calls]), one, calls)
        return found and (found.row, found.part, found.token, found.was, found.now)

    assert against(*one) is None
    assert against(call(0, [1, 2], [3, 4, 9]), one[1]) == (0, "answer", 2, "5", "9")
    assert against(one[0], call(1, [1, 2, 3, 4, 5, 8], [7])) == (1, "prompt", 5, "6", "8")
    assert against(one[0], call(1, [1, 2, 3, 4, 5, 6], [7, 8])) == (1, "answer", 1, "nothing", "8")
    assert against(one[0]) == (1, "absent", 0, "a call", "no such call")
    assert against(*one, call(2, [1], [2])) == (2, "absent", 0, "no such call", "a call")


@pytest.mark.parametrize(
    ("part", "says"),
    [("absent", "turn 3, which not all of them have"), ("answer", "turn 3, token 7 of the answer")],
)
def test_a_divergence_is_named_by_its_turn_and_token(part: str, says: str) -> None:
    model: Any = SimpleNamespace(rows=[("a", 3)])
    departure = _departure(SiblingDivergence(0, ("a", 3), part, 7, "was", "now"), model)
    assert "".join(map(str, departure)) == says


def test_the_earliest_divergence_of_a_row_is_in_its_prompt() -> None:
    ordered = [
        SiblingDivergence(row, ("a", row), part, token, "was", "now")
        for row, part, token in (
            (1, "prompt", 7),
            (1, "prompt", 9),
            (1, "answer", 0),
            (1, "answer", 2),
            (2, "prompt", 0),
        )
    ]
    for first in range(len(ordered)):
        assert earliest(reversed(ordered[first:])) == ordered[first]
    assert earliest([]) is None


def team(*names: str) -> list[CallAccount]:
    """Calls of agents in this order; each call's tokens depend on its agent and turn alone."""
    return [
        call(place, [ord(name)], [names[:place].count(name)], agent=name, turn=names[:place].count(name))
        for place, name in enumerate(names)
    ]


def test_calls_of_a_team_are_aligned_by_agent_and_not_by_their_order() -> None:
    one, other = team("p", "c", "r"), team("p", "r", "c")  # two agents at the same time
    rows = align([one, other])
    assert rows == [("p", 0), ("c", 0), ("r", 0)]
    assert first_divergence(rows, one, other) is None
    longer = team("p", "c", "c", "r")
    rows = align([one, longer])
    assert rows == [("p", 0), ("c", 0), ("c", 1), ("r", 0)]
    found = first_divergence(rows, one, longer)
    assert found is not None
    assert (found.row, found.turn, found.part) == (2, ("c", 1), "absent")


@given(st.lists(st.text("pcr", max_size=12), min_size=1, max_size=4))
def test_every_call_has_one_row_and_the_first_rollouts_keep_their_order(names: list[str]) -> None:
    rollouts = [team(*one) for one in names]
    rows = align(rollouts)
    assert sorted(rows) == sorted({turn for one in rollouts for turn in by_turn(one)})
    assert [turn for turn in rows if turn in by_turn(rollouts[0])] == list(by_turn(rollouts[0]))
    for agent in "pcr":
        turns = [number for name, number in rows if name == agent]
        assert turns == sorted(turns)


def test_choices_of_one_request_each_have_a_row() -> None:
    first = [call(0, [1], [2], turn=0), call(1, [1], [3], turn=0), call(2, [1, 2, 4], [5], turn=1)]
    rows = by_turn(first)
    assert [found.index for found in rows.values()] == [0, 2, 1], "the further choice comes last"
    assert align([first, first]) == list(rows)


def test_answers_too_long_to_compare_by_eye_contradict_nothing() -> None:
    class Words:
        def text(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    decoder: Any = Words()
    pair = [rollout(call(0, [1], [token] * 4001), name=str(token)) for token in (5, 6)]
    judged = [
        replace(one, credit=replace(one.credit, reward=reward)) for one, reward in zip(pair, (0.0, 1.0), strict=True)
    ]
    assert find_contradiction(judged, decoder) is None
    short = [replace(one, calls=[call(0, [1], [5])]) for one in judged]
    assert find_contradiction(short, decoder) is not None


def test_gaps_are_the_times_at_which_nothing_ran() -> None:
    tool = ToolAccount("t", None, 1.25, 1.0, False, None, None)
    # Calls run from 0 to .5 and from 1 to 1.5; the tool ends at 2.25, the rollout at 10.
    assert gaps_of(rollout(call(0, [1], [2]), call(1, [1], [2]), tools=[tool])) == [(0.5, 1.0), (2.25, 10.0)]


def test_agents_without_a_lane_of_their_own_share_one_that_says_so() -> None:
    calls = [call(place, [1], [2], agent=f"agent {place}") for place in range(50)]
    svg = timeline(rollout(*calls)).find(".//svg")
    assert svg is not None
    lanes = {int(one.get("y", "0")) - 15: one.text for one in svg.iter("text") if one.get("x") == "0"}
    drawn = {str(one.findtext("title")).split(":")[0]: lanes[int(one.get("y", "0")) - 4] for one in svg.iter("rect")}
    assert len(lanes) == 41
    for place in range(50):
        assert drawn[f"call {place}"] == (f"agent {place}" if place < 39 else "11 more agents")


def test_a_reward_leads_to_the_page_of_its_call_though_the_call_is_on_another_page() -> None:
    edge = EdgeAccount("reward", 1.0, "client", 1.0, None, "span", "it is recorded on it", 70)
    account = replace(rollout(*(call(index, [1], [2]) for index in range(80))), edges=[edge])
    assert "/rollouts/r/calls/70?" in served(render_rollout(model(account)))
    assert 'href="#call-70"' in explanation_page(account)


def test_the_next_call_keeps_the_overlay_that_was_chosen_last() -> None:
    one = tokens_model(["a"])
    page = render_tokens(replace(one, account=rollout(one.call, call(1, [1], [2]))))
    [section] = [part for part in page.body if isinstance(part, Element) and part.get("id") == "tokens"]
    assert [part.text for part in section.iter("a") if "/calls/1" in part.get("href", "")] == ["next call"]


def test_the_pages_of_a_long_answer_count_from_one_and_lead_both_ways() -> None:
    whole = tokens_model([" token"] * 40_000)
    assert f"tokens 1 to {count(16_384)} of {count(40_000)}" in shown_part(whole, 0)
    assert all(name not in shown_part(whole, 0) for name in ("first tokens", "previous tokens"))
    second = shown_part(whole, 16_384)
    assert f"tokens {count(16_385)} to {count(32_768)} of {count(40_000)}" in second
    assert "first tokens" not in second, "the previous tokens are the first"
    last = shown_part(whole, 32_768)
    assert f"tokens {count(32_769)} to {count(40_000)} of {count(40_000)}" in last
    assert "next tokens" not in last
    assert '<a href="/rollouts/r/calls/0?start=16384">previous tokens</a>' in last
    assert '<a href="/rollouts/r/calls/0">first tokens</a>' in last


def shown_part(whole: TokensModel, start: int) -> str:
    """The page of the tokens from `start`."""
    part = slice(start, start + MOST_TOKENS)
    assert whole.overlay
    overlay = replace(whole.overlay, values=whole.overlay.values[part])
    fields = {"ids": whole.ids[part], "pieces": whole.pieces[part], "logprobs": whole.logprobs[part]}
    return served(render_tokens(replace(whole, start=start, overlay=overlay, **fields)))


def test_a_rollout_that_still_runs_is_asked_for_again() -> None:
    ended = rollout(call(0, [1], [2]))
    running = replace(ended, status=None)
    pages: list[Page] = [render_rollout(model(one)) for one in (ended, running)]
    assert [page.live for page in pages] == [None, "/rollouts/r"]

"""A walk from a dataset to a group, a rollout and its tokens, and what another credit would have given."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.viewer.support.world import EVIL, Viewer, World


@pytest.fixture(autouse=True)
def _patient(page: Any) -> None:
    page.set_default_timeout(100_000)  # a page may take long on a busy machine


def test_a_group_shows_its_siblings_and_where_they_depart(page: Any, world: World) -> None:
    page.goto(f"/datasets/{world.dataset}")
    page.get_by_role("table", name="groups").locator("tbody tr").first.get_by_role("link").first.click()
    page.wait_for_url("**/groups/**")
    heads = page.locator("table.siblings thead th")
    assert heads.count() == 5
    assert "R = 1" in heads.nth(3).inner_text()
    assert "exactly the same tokens" in page.locator("p.lead").inner_text()


def test_a_changed_credit_gives_the_numbers_of_explain(page: Any, world: World) -> None:
    page.goto(f"/rollouts/view-m2?dataset={world.dataset}")
    page.get_by_role("link", name="side by side").click()
    page.get_by_text("What if?").click()
    page.get_by_label("baseline").select_option("dr_grpo")
    changed = page.locator("#what-if table tbody tr")
    changed.first.wait_for()
    assert "baseline=dr_grpo" in page.url
    shown = {
        (cells[0], int(cells[1])): cells[6] for cells in (row.locator("td").all_inner_texts() for row in changed.all())
    }
    assert len(shown) == 8
    command = [sys.executable, "-m", "trainspan_cli", "explain", "view-m2", "--store", world.store]
    done = subprocess.run(
        [*command, "--baseline", "dr_grpo", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "TRAINSPAN_HOME": str(world.home)},
    )
    account = json.loads(done.stdout)
    for call in account["calls"]:
        assert shown["view-m2", call["index"]] == f"{call['advantage']:.5g}" == "0.5"
    page.get_by_text("derivation of view-m2").click()
    lines = page.locator("#what-if details[open] li").all_inner_texts()
    assert lines == account["credit"]["lines"]
    page.reload()
    assert page.get_by_label("baseline").input_value() == "dr_grpo"
    assert page.locator("#what-if table tbody tr").count() == 8


def test_tokens_tell_their_numbers_to_the_mouse_and_the_keyboard(page: Any, world: World) -> None:
    page.goto(f"/rollouts/view-m2/calls/1?dataset={world.dataset}")
    say = page.locator("#tokens .say")
    page.locator("pre.tokens i").nth(2).hover()
    assert say.inner_text() == 'token 2 · "22 " · id 22 · advantage 0.86588 · log-probability -0.5'
    page.get_by_role("link", name="log-probability").click()
    page.wait_for_url("**overlay=logprob**")
    page.locator("pre.tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert say.inner_text().startswith('token 1 · "21 "')
    page.get_by_role("link", name="entropy").click()
    page.get_by_text("No entropy here").wait_for()
    page.go_back()
    page.locator("pre.tokens.tokens").wait_for()
    assert page.locator("#tokens nav a[aria-current]").inner_text() == "log-probability"


def test_hostile_text_stays_text_and_no_page_is_too_wide(page: Any, world: World, viewer: Viewer) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    for path in (
        f"/rollouts/view-h0?dataset={world.dataset}",
        f"/rollouts/view-h0/group?dataset={world.dataset}",
        f"/rollouts/view-h0/spans?dataset={world.dataset}",
        f"/rollouts/view-h0/calls/0?dataset={world.dataset}",
        f"/rollouts/view-m0?dataset={world.dataset}&credit=return_to_go&baseline=rloo",
    ):
        answer = page.goto(path)
        assert answer.status == 200, path
        assert len(answer.body()) < 1_000_000, path
        assert page.title() != "owned"
        assert page.locator("main img, main script, main [onload], main [onerror]").count() == 0
        assert page.evaluate("[...document.links].every((one) => one.origin === location.origin)"), path
        assert not {"\u202e", "\x1b"} & set(page.locator("main").inner_text()), path
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
    page.goto(f"/rollouts/view-h0?dataset={world.dataset}")
    assert EVIL[:40] in page.content().replace("&lt;", "<").replace("&gt;", ">")
    assert page.request.get(f"/rollouts/view-m0?dataset={world.dataset}&baseline=os:system").status == 400
    assert page.request.get("/rollouts/nobody").status == 400

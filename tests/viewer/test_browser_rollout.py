"""A walk from a dataset to a group, a rollout and its tokens, and what another credit would have given."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.viewer.support.world import EVIL, World


@pytest.fixture(autouse=True)
def _patient(page: Any) -> None:
    page.set_default_timeout(100_000)  # a page may take long on a busy machine


def test_a_group_shows_its_siblings_and_where_they_depart(page: Any, world: World) -> None:
    page.goto(f"/datasets/{world.dataset}")
    page.get_by_role("table", name="groups").locator("tbody tr").first.get_by_role("link").first.click()
    page.wait_for_url("**/groups/**")
    heads = page.locator("table.siblings thead th")
    assert heads.count() == 5
    assert "R = 1" in heads.nth(1).inner_text()
    assert "exactly the same tokens" in page.locator("p.lead").inner_text()


@pytest.mark.ci
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
    page.get_by_label("gamma").fill("0.5")
    page.get_by_label("gamma").press("Tab")
    page.wait_for_url("**gamma=0.5**")
    page.go_back()
    page.get_by_text("With baseline = dr_grpo, gamma = 0.5").wait_for(state="hidden")
    assert page.get_by_label("gamma").input_value() == "1"
    assert page.get_by_label("baseline").input_value() == "dr_grpo"


def test_settings_changed_in_quick_succession_all_count(page: Any, world: World) -> None:
    page.goto(f"/rollouts/view-m2?dataset={world.dataset}")
    page.evaluate(
        """() => {
          const real = window.fetch;
          let first = null;  // the second answer comes well after the first
          window.fetch = (...asked) => {
            if (first) return first.then(() => new Promise((done) => setTimeout(done, 500))).then(() => real(...asked));
            return (first = real(...asked));
          };
          for (const [name, value] of [["baseline", "dr_grpo"], ["gamma", "0.5"]]) {
            const field = document.querySelector(`#what-if [name=${name}]`);
            field.value = value;
            field.dispatchEvent(new Event("change", { bubbles: true }));
          }
        }"""
    )
    page.wait_for_url("**gamma=0.5**")
    page.get_by_text("With baseline = dr_grpo, gamma = 0.5").wait_for(timeout=20_000)
    assert [page.get_by_label(name).input_value() for name in ("baseline", "gamma")] == ["dr_grpo", "0.5"]


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


def test_the_trainers_figures_color_the_tokens(page: Any, world: World) -> None:
    page.goto(f"/rollouts/view-m1/calls/1?dataset={world.dataset}")
    for name, title, shown in (
        ("entropy", "entropy", "entropy 2 "),
        ("mismatch", "server–trainer mismatch", "mismatch -1 "),
        ("ratio", "log ratio", "log ratio -0.69315 "),
        ("clip", "clip", "clip -1 "),
    ):
        page.get_by_role("link", name=title, exact=True).click()
        page.wait_for_url(f"**overlay={name}**")
        tokens = page.locator("pre.tokens i")
        tokens.nth(4).hover()
        assert shown in page.locator("#tokens .say").inner_text()
        colors = [tokens.nth(place).evaluate("one => getComputedStyle(one).backgroundColor") for place in (0, 4)]
        assert colors[0] != colors[1], name


def test_hostile_text_is_shown_and_hostile_addresses_are_refused(page: Any, world: World) -> None:
    page.goto(f"/rollouts/view-h0?dataset={world.dataset}")
    assert EVIL[:40] in page.content().replace("&lt;", "<").replace("&gt;", ">")
    assert page.request.get(f"/rollouts/view-m0?dataset={world.dataset}&baseline=os:system").status == 400
    assert page.request.get("/rollouts/nobody").status == 404
    assert page.request.get("/rollouts/nobody/spans").status == 404

"""A walk through the pages in a real browser: they load, filter, lead to evidence, update, and keep hostile text as text."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tls import make_certificate
from tests.viewer.support.world import RUN, SLOW_VIEW, Viewer, World, serving

pytestmark = pytest.mark.ci


def test_the_address_with_the_token_opens_the_pages_and_leaves_no_token_behind(page: Any, viewer: Viewer) -> None:
    assert page.url == f"{viewer.url}/"
    assert page.locator("h1").inner_text() == "Runs"
    assert viewer.key not in page.content()
    cookies = page.context.cookies()
    assert all(one["value"] not in (viewer.key, viewer.token) and one["httpOnly"] for one in cookies)
    assert all(one["expires"] == -1 for one in cookies)


def test_a_red_check_leads_to_its_evidence(page: Any) -> None:
    page.get_by_role("link", name=RUN).click()
    assert page.locator("figure svg").count() >= 5
    red = page.locator(".grid td a.bad")
    assert red.count() == 1
    red.click()
    first = page.locator("section.check").first
    assert "server and trainer agree" in first.inner_text()
    assert "the last line of the log" in first.inner_text()
    page.go_back()
    assert page.url.endswith(f"/runs/{RUN}")


def test_marked_runs_are_compared(page: Any) -> None:
    for box in page.get_by_role("checkbox").all():
        box.check()
    page.get_by_role("button", name="compare the marked runs").click()
    assert page.locator("h1").inner_text() == "2 runs"
    assert page.locator("svg .band").count() == 2
    assert "learning_rate" in page.get_by_role("table", name="settings that differ").inner_text()


def test_runs_beyond_those_that_fit_are_said_to_be_left_out(page: Any, world: World) -> None:
    made = [world.home / "runs" / f"20250101-000000-0000000{number}" for number in range(9)]
    for folder in made:
        folder.mkdir()
        (folder / "run.json").write_text((world.home / "runs" / RUN / "run.json").read_text())
    page.goto("/compare?" + "&".join(f"run={folder.name}" for folder in made))
    assert page.locator("p.warn").inner_text() == "1 of the 9 chosen runs are left out."
    for folder in made:
        shutil.rmtree(folder)


def test_groups_are_filtered_and_a_reason_leads_to_its_rollouts(page: Any, world: World) -> None:
    page.goto(f"/datasets/{world.dataset}")
    groups = page.get_by_role("table", name="groups").locator("tbody tr")
    assert groups.count() == 3
    assert "mixed" in groups.first.inner_text()  # the largest spread first
    assert groups.first.locator("circle").count() == 4
    page.get_by_label("search in ids and answers").fill("equal")
    page.get_by_role("button", name="show").click()
    assert page.get_by_role("table", name="groups").locator("tbody tr").count() == 1
    assert "text=equal" in page.url
    page.get_by_role("link", name="quality").click()
    assert page.locator("figure svg").count() >= 5
    page.get_by_role("link", name="zero_spread_group", exact=True).click()
    rollouts = page.get_by_role("table", name="rollouts").locator("tbody tr")
    assert sorted(rollouts.locator("td:first-child").all_inner_texts()) == ["view-e0", "view-e1"]


WAITS = "Updates wait while a part of this page is selected or in focus"


@contextlib.contextmanager
def one_more_run(world: World) -> Iterator[str]:
    folder = world.home / "runs" / "20260103-000000-11111111"
    folder.mkdir()
    run = json.loads((world.home / "runs" / RUN / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "run_id": folder.name, "best": None}))
    yield folder.name
    shutil.rmtree(folder)


def test_an_update_arrives_by_itself(page: Any, world: World) -> None:
    with one_more_run(world) as name:
        link = page.get_by_role("link", name=name)
        link.wait_for(timeout=15_000)
        assert link.get_attribute("href") == f"/runs/{name}"
        link.focus()
        waits = page.get_by_text(WAITS)
        waits.wait_for(timeout=15_000)
        page.evaluate("document.activeElement.blur()")
        waits.wait_for(state="hidden", timeout=15_000)


def test_an_update_that_arrives_after_the_reader_has_begun_to_use_the_page_waits_too(page: Any, world: World) -> None:
    held = """(...asked) => {
        document.body.dataset.held = 1;
        return new Promise((go) => { window.go = go; }).then(() => window.answers(...asked));
    }"""
    page.evaluate(f"window.answers = window.fetch; window.fetch = {held}; 0")
    page.locator("body[data-held]").wait_for(timeout=15_000)
    with one_more_run(world) as name:
        page.get_by_role("link", name=RUN).first.focus()
        page.evaluate("document.activeElement.dataset.mine = 1; window.fetch = window.answers; window.go(); 0")
        page.get_by_text(WAITS).wait_for(timeout=15_000)
        assert page.evaluate("document.activeElement.dataset.mine") == "1"
        page.evaluate("document.activeElement.blur()")
        page.get_by_role("link", name=name).wait_for(timeout=15_000)


def test_a_page_that_cannot_update_says_since_when(page: Any) -> None:
    page.evaluate("window.answers = window.fetch; window.fetch = async () => new Response(null, { status: 503 }); 0")
    stale = page.get_by_text("Not updated since")
    stale.wait_for(timeout=15_000)
    assert re.search(r"Not updated since \S*\d", stale.inner_text())
    page.evaluate("window.fetch = window.answers; 0")
    stale.wait_for(state="hidden", timeout=30_000)
    assert page.get_by_role("link", name=RUN).first.is_visible()


def test_tables_scroll_in_narrow_windows_and_charts_fill_wide_ones(page: Any, world: World) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    page.goto(f"/datasets/{world.dataset}")
    boxes = "[...document.querySelectorAll('td svg')].map((one) => one.getBoundingClientRect().width)"
    assert set(page.evaluate(boxes)) == {220}
    lines = "[...document.querySelectorAll('th, td.l > a')].map((one) => one.getClientRects().length)"
    assert set(page.evaluate(lines)) == {1}
    page.set_viewport_size({"width": 1600, "height": 900})
    page.goto(f"/runs/{RUN}")
    ends = "Math.max(...[...document.querySelectorAll('figure')].map((one) => one.getBoundingClientRect().right))"
    assert page.evaluate(ends) > 0.8 * 1600


def test_keys_move_through_rows_and_the_theme_can_be_chosen(page: Any) -> None:
    page.keyboard.press("j")
    first = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") != first
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/*")
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.get_by_role("button", name="light or dark").click()
    assert page.evaluate(background) != before
    page.reload()
    assert page.evaluate(background) != before


def test_every_page_keeps_hostile_text_as_text_and_fits_a_narrow_window(page: Any, world: World) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    for path in _paths(world):
        answer = page.goto(path)
        assert answer.status == 200, path
        assert len(answer.body()) < 1_000_000, path
        found = page.evaluate(LOOK)
        assert found.pop("width") <= 360, path
        assert found == {"title": False, "code": 0, "foreign": 0, "controls": False}, path


LOOK = """() => ({
  width: document.documentElement.scrollWidth,
  title: document.title === "owned",
  code: document.querySelectorAll("main img, main script, main [onload], main [onerror], [style]").length,
  foreign: [...document.links].filter((one) => one.origin !== location.origin).length,
  controls: /[\\u202e\\x1b]/.test(document.querySelector("main").textContent),
})"""
"""What a page must not have."""


def _paths(world: World) -> list[str]:
    return [
        "/",
        "/datasets",
        "/live",
        f"/runs/{RUN}",
        f"/runs/{RUN}/records/2",
        f"/compare?run={RUN}&run=20260101-000000-ffffffff",
        *(f"/datasets/{world.dataset}?view={view}" for view in ("groups", "rollouts", "quality")),
        f"/datasets/{world.dataset}?view=diff&other=round-0001",
        f"/rollouts/view-h1?dataset={world.dataset}",
        *(f"/rollouts/view-h0{below}?dataset={world.dataset}" for below in ("", "/group", "/spans", "/calls/0")),
        f"/rollouts/view-m0?dataset={world.dataset}&credit=return_to_go&baseline=rloo",
    ]


def test_a_page_that_takes_long_appears_once_it_is_ready(chromium: Any, world: World) -> None:
    with (
        serving(world.home, world.store, program=SLOW_VIEW, page_wait_ms=30) as running,
        contextlib.closing(chromium.new_context(base_url=running.url)) as context,
    ):
        page = context.new_page()
        page.goto(f"/?key={running.key}")
        page.wait_for_selector("h1:has-text('Runs')")  # the waiting page would navigate once more
        page.goto("/slow/3000", wait_until="commit")  # the page asks again by itself, maybe before it has loaded
        assert page.locator("main[data-waiting] [role=status]").inner_text() == "The store is being read…"
        page.wait_for_selector("h1:has-text('Slept 3000 ms')", timeout=60_000)
        assert page.locator("main[data-waiting]").count() == 0


def test_pages_over_tls_work_in_a_browser(chromium: Any, world: World, tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    with (
        serving(world.home, world.store, tls_cert=made.certificate, tls_key=made.key) as running,
        contextlib.closing(chromium.new_context(base_url=running.url, ignore_https_errors=True)) as context,
    ):
        page, errors = context.new_page(), list[str]()
        page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"/?key={running.key}")
        assert page.url == f"{running.url}/"
        assert page.url.startswith("https://")
        assert [one["secure"] for one in page.context.cookies()] == [True]
        page.get_by_role("link", name=RUN).click()
        assert page.locator("figure svg").count() >= 5
        page.goto("/live")
        with page.expect_response(lambda answer: answer.request.resource_type == "fetch", timeout=15_000) as update:
            pass
        assert update.value.status in (200, 304)
        assert errors == []


def test_a_run_says_first_what_became_better_and_by_how_much(page: Any) -> None:
    page.get_by_role("link", name=RUN).click()
    said = page.locator("main p.lead").first.inner_text()
    assert said.startswith("Success on held-out tasks rose by 0.500, from 0.250 [")
    assert "after round 0 to 0.750 [" in said
    assert "overlap" not in said
    assert page.get_by_text("success after each round").count()


_WORDS_ON_ONE_LINE = """heads => heads.every(head => [...head.firstChild.data.matchAll(/\\S+/g)].every(word => {
  const range = document.createRange();
  range.setStart(head.firstChild, word.index);
  range.setEnd(head.firstChild, word.index + word[0].length);
  return range.getClientRects().length === 1;
}))"""


def test_the_heads_of_turns_are_not_broken_within_a_word(page: Any, world: World) -> None:
    page.goto(f"/datasets/{world.dataset}")
    page.get_by_role("table", name="groups").locator("tbody tr td:first-child a").first.click()
    heads = page.locator("table.siblings tbody th")
    assert heads.all_inner_texts() == ["turn 0", "turn 1"]
    assert heads.evaluate_all(_WORDS_ON_ONE_LINE)
    page.locator("table.siblings th:first-child").evaluate_all(
        "heads => heads.forEach(head => Object.assign(head.style, {width: '3rem', minWidth: '3rem', maxWidth: '3rem',"
        " overflowWrap: 'anywhere'}))"
    )
    assert not heads.evaluate_all(_WORDS_ON_ONE_LINE)  # as it was: "tur n 0"


def test_an_id_is_short_and_copied_whole(page: Any, world: World) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"/datasets/{world.dataset}")
    page.get_by_role("table", name="groups").locator("tbody tr td:first-child a").first.click()
    page.locator("table.siblings thead a").first.click()
    button = page.get_by_role("button", name="copy the whole id")
    whole = button.get_attribute("data-copy")
    assert len(page.locator("h1").inner_text()) <= len("Rollout ") + 13
    button.click()
    page.wait_for_function("document.querySelector('button[data-copy]').textContent === 'copied'")
    assert page.evaluate("navigator.clipboard.readText()") == whole

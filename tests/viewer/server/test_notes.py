"""Notes: who can write them, that they last, and that nothing else changes."""

import contextlib
import re
import resource
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.viewer.support.world import EVIL, RUN, Viewer, World, serving
from trainspan_schemas.errors import UsageError
from trainspan_viewer.pages.notes import Desk, notes_part
from trainspan_viewer.queries.notes.note_file import MOST_BYTES, Draft, NoteError, NoteFile
from trainspan_viewer.queries.notes.subject import Subject
from trainspan_viewer.queries.notes.submission import Submission
from trainspan_viewer.queries.store import StoreReader

ON_RUN = {"kind": "run", "name": RUN, "title": f"Run {RUN}", "back": f"/runs/{RUN}?from=1"}


def token_of_form(viewer: Viewer) -> str:
    (found, *_) = re.findall(r'name="token" value="([^"]+)"', viewer.get(f"/runs/{RUN}").text)
    return str(found)


def write(viewer: Viewer, text: str, **more: object) -> None:
    answer = viewer.post("/notes", {**ON_RUN, "token": token_of_form(viewer), "text": text, **more})
    assert answer.status == 303, answer.text


@pytest.fixture(autouse=True)
def _no_notes(world: World) -> Iterator[None]:
    yield
    (world.home / "notes.sqlite").unlink(missing_ok=True)


def test_a_note_is_shown_changed_and_deleted_and_only_its_user_reads_the_file(viewer: Viewer, world: World) -> None:
    form = {"token": token_of_form(viewer)}
    answer = viewer.post("/notes", {**ON_RUN, **form, "text": "  the judge\r\nis wrong "})
    assert (answer.status, answer.headers["location"]) == (303, f"/runs/{RUN}?from=1#notes")
    page = viewer.get(f"/runs/{RUN}").text
    assert '<pre dir="auto">the judge\nis wrong</pre>' in page
    assert stat.S_IMODE((world.home / "notes.sqlite").stat().st_mode) == 0o600
    (number,) = re.findall(r'action="/notes/(\d+)"', page)
    (changed,) = re.findall(r'name="seen" value="(\d+)"', page)
    first = viewer.post(f"/notes/{number}", {**form, "seen": changed, "text": "it was the agent"})
    assert first.status == 303
    late = viewer.post(f"/notes/{number}", {**form, "seen": changed, "text": "my other words"})
    assert late.status == 409
    assert "changed or deleted meanwhile" in late.text
    assert "my other words" in late.text
    listed = viewer.get("/notes").text
    assert "it was the agent" in listed
    assert f'href="/runs/{RUN}"' in listed
    assert "it was the agent" not in viewer.get("/notes?text=nothing").text
    (now,) = re.findall(r'name="seen" value="(\d+)"', listed)
    assert viewer.post(f"/notes/{number}/delete", {**form, "seen": now, "text": ""}).status == 303
    assert "it was the agent" not in viewer.get("/notes").text
    assert b"it was the agent" not in (world.home / "notes.sqlite").read_bytes()


def test_notes_on_a_call_name_tokens_and_are_shown_with_the_rollout_too(viewer: Viewer, world: World) -> None:
    place = f"/rollouts/view-m2/calls/1?dataset={world.dataset}&attempt=0"
    about = {"kind": "call", "name": "view-m2", "attempt": 0, "call": 1, "dataset": world.dataset, "title": "Call 1"}
    write(viewer, "a slip", **about, first="2", last="4")
    for path in (place, f"/rollouts/view-m2?dataset={world.dataset}", "/rollouts/view-m2/calls/1"):
        page = viewer.get(path).text
        assert "a slip" in page, path
        assert "tokens 2 to 4" in page, path
    assert "a slip" not in viewer.get("/rollouts/view-m2/calls/0").text
    assert "a slip" not in viewer.get("/rollouts/view-m1").text
    assert place in unescape(viewer.get("/notes").text).replace("%3A", ":")
    form = {**about, "token": token_of_form(viewer), "text": "x"}
    assert viewer.post("/notes", {**form, "first": "4", "last": "2"}).status == 400
    assert viewer.post("/notes", {**form, "first": "-1"}).status == 400


def test_every_kind_of_page_takes_notes_and_their_links_lead_back(viewer: Viewer, world: World) -> None:
    groups = re.findall(r'href="(/groups/[^"]+)"', viewer.get(f"/datasets/{world.dataset}").text)
    for path in (
        f"/runs/{RUN}",
        f"/datasets/{world.dataset}",
        unescape(groups[0]),
        f"/rollouts/view-m2/group?dataset={world.dataset}",
        f"/rollouts/view-m2?dataset={world.dataset}",
        f"/rollouts/view-m2/calls/0?dataset={world.dataset}",
    ):
        (form,) = re.findall(r'<details id="add-note">(.*?)</details>', viewer.get(path).text, re.DOTALL)
        fields = {name: unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', form)}
        answer = viewer.post("/notes", {**fields, "text": f"about {path}"})
        assert answer.status == 303, answer.text
        assert f"about {path}" in unescape(viewer.get(answer.headers["location"].partition("#")[0]).text)
    links = re.findall(r'<p class="note"><a href="([^"]+)"', viewer.get("/notes").text)
    assert len(links) == 6
    assert {viewer.get(unescape(link)).status for link in links} == {200}


def test_another_origins_page_cannot_write(viewer: Viewer) -> None:
    form = {**ON_RUN, "token": token_of_form(viewer), "text": "forged"}
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": viewer.url.replace("127.0.0.1", "localhost")},
        {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
        {"sec_fetch_site": "same-site"},
    ):
        assert viewer.post("/notes", form, **headers).status == 403, headers
    assert viewer.post("/notes", form, authorization="Bearer wrong").status == 401
    assert viewer.post("/notes", form, host="evil.example").status == 421
    assert viewer.post("/notes", form, content_type="text/plain").status == 415
    assert viewer.post("/notes", {**form, "token": ""}).status == 403
    assert viewer.post("/notes", {**form, "token": viewer.key}).status == 403
    assert viewer.get("/notes/1/delete").status == 404
    assert "forged" not in viewer.get("/notes").text


def test_what_is_too_long_or_odd_is_refused_with_a_reason(viewer: Viewer) -> None:
    form = {**ON_RUN, "token": token_of_form(viewer)}
    for fields, status, said in (
        ({"text": "ä" * MOST_BYTES}, 400, "at most 4096"),
        ({"text": " \n "}, 400, "is empty"),
        ({"text": "x" * 70_000}, 413, "more than 65536"),
        ({"text": "x", "kind": "reward"}, 400, "is about one of"),
        ({"text": "x", "name": ""}, 400, "has 0 characters"),
        ({"text": "x", "kind": "call", "call": "x"}, 400, "not a whole number"),
        ({"text": "x", **{f"more{number}": "" for number in range(30)}}, 400, "more than 20 fields"),
    ):
        answer = viewer.post("/notes", {**form, **fields})
        assert (answer.status, said in answer.text) == (status, True), answer.text[-500:]
    for back in ("//evil.example", "https://evil.example/", "/\\evil.example", "/a\r\nx-evil: 1", ""):
        answer = viewer.post("/notes", {**form, "text": "x", "back": back})
        assert (answer.status, answer.headers["location"]) == (303, "/notes#notes")
        assert "x-evil" not in answer.headers


def test_a_subject_with_an_odd_name_keeps_its_notes(tmp_path: Path) -> None:
    """Pages show invisible characters as signs; the form must not send these."""
    odd = Subject("rollout", "a/b%2f \u202e\x1b", 0)
    part = notes_part([], odd, "title", Desk("secret", "/"))
    assert part is not None
    found = {one.get("name", ""): one.get("value", "") for one in part.iter("input")}
    sent = Submission.of_body(urlencode({**found, "text": "x"}).encode()).draft
    assert sent.subject == odd
    notes = NoteFile(tmp_path / "notes.sqlite")
    notes.add(sent)
    assert [one.draft.text for one in notes.about(odd)] == ["x"]


def test_hostile_notes_stay_text(viewer: Viewer) -> None:
    write(viewer, EVIL, title=EVIL)
    for path in (f"/runs/{RUN}", "/notes"):
        page = viewer.get(path).text
        found = _tags(page)
        assert "article" in found
        assert "img" not in found
        assert found.count("script") == 1
        assert not re.search("[\u202e\x1b]", page)


def test_notes_last_and_two_viewers_share_them(viewer: Viewer, world: World) -> None:
    write(viewer, "from the first")
    with serving(world.home, world.store) as other:
        assert "from the first" in other.get("/notes").text
        forms = {one.url: token_of_form(one) for one in (viewer, other)}
        with ThreadPoolExecutor(8) as pool:
            both = [(viewer, other)[place % 2] for place in range(40)]
            fields = [
                {**ON_RUN, "token": forms[one.url], "text": f"note {place:02d}."} for place, one in enumerate(both)
            ]
            done = [answer.status for answer in pool.map(lambda one, sent: one.post("/notes", sent), both, fields)]
            assert set(done) == {303}
    page = viewer.get("/notes").text
    assert all(f"note {place:02d}." in page for place in range(40))


def test_a_server_that_takes_no_notes_says_so(world: World, viewer: Viewer) -> None:
    write(viewer, "to be read")
    for setting, reason in (("read_only", "--read-only"), ("open_to_all", "open_to_all")):
        with serving(world.home, world.store, **{setting: True}) as running:
            page = running.get(f"/runs/{RUN}").text
            assert "to be read" in page
            assert 'method="post"' not in page
            answer = running.post("/notes", {**ON_RUN, "token": token_of_form(viewer), "text": "x"})
            assert (answer.status, reason in answer.text) == (403, True)


def test_a_note_changes_no_row_of_the_store(viewer: Viewer, world: World) -> None:
    count = "SELECT (SELECT count(*) FROM evaluations), (SELECT count(*) FROM spans), (SELECT count(*) FROM logs)"
    before = _rows(world, count)
    assert before[0][1] > 0
    write(viewer, "reward: 1.0", kind="rollout", name="view-m0", attempt=0)
    assert _rows(world, count) == before


def _rows(world: World, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(StoreReader(world.store)) as store:
        return store.select(sql).rows


def _tags(page: str) -> list[str]:
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, _: found.append(tag)  # type: ignore[method-assign]
    parser.feed(page)
    return found


@contextlib.contextmanager
def _file_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_and_a_read_only_one_are_said_and_no_note_is_lost(tmp_path: Path) -> None:
    notes = NoteFile(tmp_path / "notes.sqlite")
    draft = Draft(Subject("run", RUN), "title", "x" * 4000)
    notes.add(draft)
    with (
        _file_limit(notes.path.stat().st_size),
        pytest.raises(NoteError, match=r"notes cannot be written: .*notes\.sqlite"),
    ):
        notes.add(draft)
    assert len(notes.about(draft.subject)) == 1
    notes.add(draft)
    assert len(notes.about(draft.subject)) == 2
    with pytest.raises(NoteError, match=r"cannot be written: /sys/notes\.sqlite: "):
        NoteFile(Path("/sys/notes.sqlite")).add(draft)


def test_a_full_or_damaged_or_newer_file_is_said_and_pages_stay(
    viewer: Viewer, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = NoteFile(tmp_path / "notes.sqlite")
    monkeypatch.setattr("trainspan_viewer.queries.notes.note_file._MOST_PAGES", 6)
    full.add(Draft(Subject("run", RUN), "title", "x" * 4000))
    full.add(Draft(Subject("run", RUN), "title", "x" * 4000))
    with pytest.raises(NoteError, match="full"):
        full.add(Draft(Subject("run", RUN), "title", "x" * 4000))
    assert full.newest(0, 50)[1] == 2
    with contextlib.closing(sqlite3.connect(full.path)) as connection:
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(NoteError, match="a newer trainspan wrote them"):
        full.newest(0, 50)
    (world.home / "notes.sqlite").write_bytes(b"no database" * 1000)
    for path, status in ((f"/runs/{RUN}", 200), ("/notes", 503)):
        answer = viewer.get(path)
        assert (answer.status, "notes cannot be read" in answer.text) == (status, True)


def test_a_viewer_that_is_killed_while_it_writes_loses_no_earlier_note(tmp_path: Path) -> None:
    program = (
        "import sys, itertools; from pathlib import Path\n"
        "from trainspan_viewer.queries.notes.note_file import *; from trainspan_viewer.queries.notes.subject import Subject\n"
        "notes = NoteFile(Path(sys.argv[1]))\n"
        "for n in itertools.count():\n"
        "    notes.add(Draft(Subject('run', 'r'), 't', f'note {n}')); print(n, flush=True)\n"
    )
    path = tmp_path / "notes.sqlite"
    process: Any = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    while int(process.stdout.readline()) < 20:
        pass
    process.kill()
    said = [20, *map(int, process.stdout.read().split())]
    process.wait()
    notes, total = NoteFile(path).newest(0, 10_000)
    assert total in (said[-1] + 1, said[-1] + 2)
    assert [one.draft.text for one in reversed(notes)] == [f"note {n}" for n in range(total)]


def test_a_text_is_stored_as_it_is_shown(tmp_path: Path) -> None:
    notes, about = NoteFile(tmp_path / "notes.sqlite"), Subject("run", RUN)
    notes.add(Draft(about, "title", "a\r\nb \u2764\ufe0f \u202e\x1b"))
    assert notes.about(about)[0].draft.text == "a\nb \u2764 ⟨U+202E⟩␛"
    with pytest.raises(UsageError, match="empty"):
        notes.change(1, notes.about(about)[0].changed_ns, "\ufe0f")

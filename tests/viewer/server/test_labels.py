"""Labels through the viewer: who can give them, that none is lost, and what the next page and the queue show."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from tests.processing.conftest import RunningCollector
from tests.processing.support.labels import send_labels
from tests.processing.support.traces import TestRollout, chain, send
from tests.viewer.support.label_world import LABEL_RUN, make_label_world
from tests.viewer.support.world import EVIL, Viewer, World, serving
from trainspan_schemas.store.labels import Label
from trainspan_schemas.store.roles import Role, token_of
from trainspan_schemas.telemetry import keys
from trainspan_viewer.queries.labels.queue import _rollouts
from trainspan_viewer.queries.labels.sending import LabelChangedError, NotShownError, give_label
from trainspan_viewer.queries.labels.stored import TooManyLabelsError, stored_labels
from trainspan_viewer.queries.labels.submission import Submission
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.store import StoreReader

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCollector]:
    running = RunningCollector(tmp_path_factory.mktemp("labels"))
    yield running.wait()
    running.stop()


@pytest.fixture(scope="module")
def labels(own: RunningCollector, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_label_world([own], tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def labeler(labels: World) -> Iterator[Viewer]:
    with serving(labels.home, labels.store) as running:
        yield running


def fields_of(page: str) -> dict[str, str]:
    """The hidden fields of the page's form of labels."""
    (form,) = re.findall(r'<form method="post" action="/labels">(.*?)</form>', page, re.DOTALL) or [""]
    return {name: unescape(value) for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form)}


def give(viewer: Viewer, path: str, word: str, **more: str) -> Any:
    form = {**fields_of(viewer.get(path).text), "word": word, "by": "ann", "text": "", **more}
    runner = {"authorization": f"Bearer {_runner(viewer)}"}
    return viewer.post("/labels", form, **runner)


def _runner(viewer: Viewer) -> str:
    return _TOKENS[viewer.url]


_TOKENS: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _know_tokens(labeler: Viewer, labels: World) -> None:
    _TOKENS[labeler.url] = token_of(labels.home / "tokens.toml", Role.RUNNER)


def state(page: str) -> str:
    (part,) = re.findall(r'<section id="labels".*?<p class="note">(.*?)</p>', page, re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", "", part))


def add(world: World, name: str, **more: Any) -> str:
    """Sends another rollout; its page."""
    rollout = chain(TestRollout(f"label-{name}", task=f"task-{name}", run=LABEL_RUN, round=0, **more), 2).reward(1.0)
    world.bench.send(rollout)
    return f"/rollouts/label-{name}?attempt=0"


def test_a_label_is_shown_replaced_and_taken_back_and_changes_the_reward_at_once(
    labeler: Viewer, labels: World
) -> None:
    path = add(labels, "first")
    assert "This rollout has no label" in state(labeler.get(path).text)
    answer = give(labeler, path, "bad", text="  rude\r\nand wrong ")
    assert (answer.status, answer.headers["location"]) == (303, f"{path}#labels")
    page = labeler.get(path).text
    assert re.match(r"Labeled bad by ann, [-0-9]+ [:0-9]+ UTC: rude\nand wrong$", state(page))
    assert "a person labeled it, which replaces its other rewards" in page
    assert give(labeler, path, "good", by="bob").status == 303
    page = labeler.get(path).text
    assert state(page).startswith("Labeled good by bob")
    assert "1 earlier" in page
    assert give(labeler, path, "withdrawn").status == 303
    page = labeler.get(path).text
    assert state(page).startswith("The label was taken back by ann")
    assert "a later label replaces it, or takes it back" in page


def test_of_two_who_label_at_the_same_time_the_second_is_told(labeler: Viewer, labels: World) -> None:
    path = add(labels, "twice")
    with serving(labels.home, labels.store) as other:
        _TOKENS[other.url] = _TOKENS[labeler.url]
        forms = [{**fields_of(viewer.get(path).text), "by": "ann"} for viewer in (labeler, other)]
        runner = {"authorization": f"Bearer {_runner(labeler)}"}
        assert labeler.post("/labels", {**forms[0], "word": "good"}, **runner).status == 303
        late = other.post("/labels", {**forms[1], "word": "bad", "text": "my reason"}, **runner)
        assert (late.status, "'good' by ann" in unescape(late.text), "my reason" in late.text) == (409, True, True)
        paths = [add(labels, f"many-{number}") for number in range(12)]
        with ThreadPoolExecutor(6) as pool:
            both = [(labeler, other)[number % 2] for number in range(12)]
            assert {answer.status for answer in pool.map(give, both, paths, ["good"] * 12)} == {303}
    assert all(state(labeler.get(path).text).startswith("Labeled good") for path in paths)


def test_a_label_on_a_call_and_a_pair(labeler: Viewer, labels: World) -> None:
    path = add(labels, "call")
    call = path.replace("?", "/calls/1?")
    assert give(labeler, call, "bad").status == 303
    assert state(labeler.get(call).text).startswith("Labeled bad by ann")
    assert "This call has no label" in state(labeler.get(call.replace("/1?", "/0?")).text)
    assert "This rollout has no label" in state(labeler.get(path).text)
    pair = "/labels/pair?a=label-same-0:0&b=label-same-2:0"
    assert "This pair has no label" in state(labeler.get(pair).text)
    assert give(labeler, pair, "better").status == 303
    assert "the left one is better, by ann" in state(labeler.get(pair).text)
    assert state(labeler.get("/labels/pair?b=label-same-0:0&a=label-same-2:0").text) == state(labeler.get(pair).text)
    left = fields_of(labeler.get(pair).text)["rollout"].partition("%3A")[0]
    assert "better than label-same" in unescape(labeler.get(f"/rollouts/{left}").text)
    assert "compare" in labeler.get("/rollouts/label-same-0/group").text
    for a, b, status in (
        ("label-same-0:0", "label-clear:0", 400),
        ("label-same-0:0", "label-same-0:0", 400),
        ("x", "y", 400),
    ):
        assert labeler.get(f"/labels/pair?a={a}&b={b}").status == status


def test_the_queue_has_what_is_worth_labeling_and_leads_on(labels: World, tmp_path: Path) -> None:
    running = RunningCollector(tmp_path)
    try:
        world = make_label_world([running.wait()], tmp_path / "out")
        with serving(world.home, world.store) as viewer:
            _TOKENS[viewer.url] = token_of(world.home / "tokens.toml", Role.RUNNER)
            page = viewer.get("/labels").text
            items = re.findall(r'<td class="l"><a href="([^"]+)"><bdi>(\w+)</bdi></a></td><td class="l">([^<]+)<', page)
            assert [(task, why) for _, task, why in items] == [
                ("none", "no verdict"),
                ("disagree", "judges disagree"),
                ("unsure", "low confidence"),
                ("equal", "equal rewards"),
            ]
            assert "7 rollouts were looked at; 0 of them are labeled" in page
            for address, _, _ in items[:2]:
                assert give(viewer, unescape(address).partition("#")[0], "good").status == 303
            page = viewer.get(f"/labels?run={LABEL_RUN}&round=0").text
            assert "2 of them are labeled" in page
            assert "no verdict" not in page
            (start,) = re.findall(r'<a href="([^"]+)"[^>]*>label the first one', page)
            assert unescape(start) == f"/labels/next?run={LABEL_RUN}&round=0"
            first = viewer.get("/labels/next")
            assert (first.status, "label-unsure" in first.headers["location"]) == (303, True)
            pair = viewer.get("/labels/next?after=label-unsure:0").headers["location"]
            assert give(viewer, pair, "equal").status == 303
            assert "equal rewards" not in viewer.get("/labels").text
            assert viewer.get("/labels/next?after=label-unsure:0").headers["location"] == "/labels"
    finally:
        running.stop()


def test_the_next_item_is_of_the_same_run_and_after_the_one_that_was_skipped_or_labeled(
    labeler: Viewer, labels: World
) -> None:
    run, names = "walked-run", [f"label-walked-{number}" for number in range(4)]
    tasks = (TestRollout(name, task=name, run=run, begins=-float(at)) for at, name in enumerate(names))
    labels.bench.send(*(chain(rollout, 1).reward(0.5) for rollout in tasks))
    path, seen = f"/labels?run={run}", []
    for number in range(5):
        link = re.findall(r'href="(/labels/next[^"]+)"', labeler.get(path).text)[0]
        path = labeler.get(unescape(link)).headers["location"].partition("#")[0]
        seen.append(path)
        if number in (1, 2):  # the first one is skipped
            path = give(labeler, path, "good").headers["location"].partition("#")[0]
    assert [address.partition("?")[0] for address in seen] == [*(f"/rollouts/{name}" for name in names), "/labels"]
    assert path == f"/labels?run={run}"


def test_another_origins_page_and_a_readers_token_give_no_label(labeler: Viewer, labels: World) -> None:
    path = add(labels, "forged")
    runner = f"Bearer {_runner(labeler)}"
    form = {**fields_of(labeler.get(path).text), "word": "good", "by": "eve"}
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": labeler.url.replace("127.0.0.1", "localhost")},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
        {"sec_fetch_site": "same-site"},
    ):
        assert labeler.post("/labels", form, authorization=runner, **headers).status == 403, headers
    assert labeler.post("/labels", form, authorization=runner, host="evil.example").status == 421
    assert labeler.post("/labels", form, authorization="Bearer wrong").status == 401
    reader = labeler.post("/labels", form)
    assert (reader.status, "reader&#x27;s token" in reader.text or "reader's token" in reader.text) == (403, True)
    assert labeler.post("/labels", form, authorization=runner, content_type="text/plain").status == 415
    for token in ("", labeler.key):
        assert labeler.post("/labels", {**form, "token": token}, authorization=runner).status == 403
    assert labeler.get("/labels", method="PUT").status in (404, 405)
    assert "This rollout has no label" in state(labeler.get(path).text)


def test_what_is_too_long_or_odd_is_refused_with_a_reason(labeler: Viewer, labels: World) -> None:
    path = add(labels, "odd")
    runner = {"authorization": f"Bearer {_runner(labeler)}"}
    form = {**fields_of(labeler.get(path).text), "word": "good", "by": "ann"}
    cases: list[tuple[Mapping[str, str], int, str]] = [
        ({"text": "ä" * 4096}, 400, "at most 4096"),
        ({"text": "x" * 1_000_000}, 413, "more than 65536"),
        ({"word": "splendid"}, 400, "is not one of"),
        ({"word": "better"}, 400, "is not one of"),
        ({"by": " \x1b "}, 303, ""),
        ({"by": "  "}, 400, "has 0 bytes"),
        ({"by": "x" * 201}, 400, "201 bytes"),
        ({"rollout": "nothing"}, 400, "names no rollout"),
        ({"rollout": "label-gone:0"}, 404, "is not stored"),
        ({"rollout": "label-odd:7"}, 404, "is not stored"),
        ({"call": "ab" * 8}, 404, "no such call"),
        ({"call": "x' OR 1=1"}, 400, "names no call"),
        ({"other": "label-clear%3A0", "word": "better"}, 400, "not of one task"),
        ({f"more{number}": "" for number in range(30)}, 400, "more than 20 fields"),
    ]
    for fields, status, reason in cases:
        answer = labeler.post("/labels", {**form, **fields}, **runner)
        assert (answer.status, reason in unescape(answer.text)) == (status, True), (fields, answer.text[-400:])
    for back in ("//evil.example", "https://evil.example/", "/\\evil.example", "/a\r\nx-evil: 1"):
        answer = labeler.post("/labels", {**form, "seen": _seen(labeler, path), "word": "bad", "back": back}, **runner)
        assert (answer.status, answer.headers["location"]) == (303, "/labels#labels")


def _seen(viewer: Viewer, path: str) -> str:
    return fields_of(viewer.get(path).text)["seen"]


def test_hostile_labels_stay_text_and_are_stored_as_they_are_shown(labeler: Viewer, labels: World) -> None:
    path = add(labels, "evil")
    assert give(labeler, path, "bad", text=EVIL, by=f"eve {EVIL[:60]}").status == 303
    for page in (labeler.get(path).text, labeler.get("/judges").text):
        tags: list[str] = []
        parser = HTMLParser()
        parser.handle_starttag = lambda tag, _, found=tags: found.append(tag)  # type: ignore[method-assign,misc]
        parser.feed(page)
        assert "img" not in tags
        assert tags.count("script") == 1
        assert not re.search("[\u202e\x1b]", page)
    rows = StoreReader(labels.store).select("SELECT explanation FROM evaluations WHERE rollout_id = 'label-evil'").rows
    (stored,) = [text for (text,) in rows if text]
    assert ("⟨U+202E⟩" in stored, "\x1b" in stored) == (True, False)


def test_hostile_text_stays_text_and_is_cut_on_the_queue_and_beside_another_rollout(
    labeler: Viewer, labels: World
) -> None:
    megabyte = EVIL * (1_000_000 // len(EVIL))
    sides = [_hostile(f"side-{number}", EVIL, 1.0, megabyte) for number in range(2)]
    labels.bench.send(*sides, _hostile("long", megabyte, 0.5, megabyte))
    a, b = (f"{side.rollout_id}:0" for side in sides)
    pair = f"/labels/pair?a={a}&b={b}"
    assert give(labeler, pair, "better", text=EVIL).status == 303
    pages = [labeler.get(path) for path in ("/labels", pair, f"/labels?run={quote(EVIL)}&from=0")]
    for answer, most in zip(pages, (60_000, 60_000, 20_000), strict=True):
        parser = _Tags()
        parser.feed(answer.text)
        assert (answer.status, parser.hostile, parser.tags.count("script")) == (200, [], 1)
        assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f\x7f]", answer.text)
        assert len(answer.text) < most
    queue, beside, _ = (unescape(answer.text) for answer in pages)
    assert "label-long" in unquote(queue)
    assert queue.count("⟨U+202E⟩gnp.exe") >= 2
    assert f"… ({len(megabyte)} characters)" in queue
    assert beside.count("⟨U+202E⟩gnp.exe") >= 4
    assert "document.title='owned'" in beside


def _hostile(name: str, task: str, score: float, text: str) -> TestRollout:
    """A rollout whose task, agent, answer and explanation are hostile, and that only a client recorded."""
    rollout = TestRollout(f"label-{name}", task=task, run=LABEL_RUN, round=0, judge="judge.py:score")
    said = json.dumps([{"role": EVIL, "parts": [{"type": "text", "content": text}]}])
    rollout.span(
        *("client", 1.0, 2.0),
        gen_ai__operation__name="chat",
        gen_ai__agent__name=EVIL,
        gen_ai__input__messages=said,
        gen_ai__output__messages=said,
    )
    return rollout.reward(score, **{keys.EVALUATION_SOURCE: "judge", keys.EVALUATION_EXPLANATION: text})


class _Tags(HTMLParser):
    """The tags of a page, and what of them could run, load or lead elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.hostile: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("img", "svg", "iframe", "object", "embed", "base") or any(
            name.startswith("on") or (name in ("href", "src", "action") and not (value or "").startswith(("/", "#")))
            for name, value in attrs
        ):
            self.hostile.append(f"{tag} {attrs}"[:200])


def test_a_server_that_takes_no_labels_says_so(labels: World, labeler: Viewer) -> None:
    path = add(labels, "readonly")
    assert give(labeler, path, "good").status == 303
    for setting, reason in (("read_only", "--read-only"), ("open_to_all", "open_to_all")):
        with serving(labels.home, labels.store, **{setting: True}) as running:
            page = running.get(path).text
            assert state(page).startswith("Labeled good")
            assert 'method="post"' not in page
            answer = running.post("/labels", {"word": "bad"}, authorization=f"Bearer {_runner(labeler)}")
            assert (answer.status, reason in answer.text) == (403, True)


def test_while_no_collector_runs_the_page_says_so_and_a_label_is_not_lost_silently(tmp_path: Path) -> None:
    running = RunningCollector(tmp_path)
    world = make_label_world([running.wait()], tmp_path / "out")
    with serving(world.home, world.store) as viewer:
        _TOKENS[viewer.url] = token_of(world.home / "tokens.toml", Role.RUNNER)
        path = "/rollouts/label-clear?attempt=0"
        form = {**fields_of(viewer.get(path).text), "word": "good", "by": "ann", "text": "what I wrote"}
        running.stop()
        answer = viewer.post("/labels", form, authorization=f"Bearer {_runner(viewer)}")
        assert (answer.status, "what I wrote" in answer.text) == (503, True)
        assert "The label was not given" in answer.text
        page = viewer.get(path).text  # of a collector for readers, which takes no telemetry
        assert "Labels cannot be given now: no collector takes telemetry" in unescape(page)
        assert 'method="post"' not in page
        assert "Labels cannot be given now" in viewer.get("/labels").text


def test_a_rollout_that_is_purged_takes_no_label_and_its_labels_go_with_it(labeler: Viewer, labels: World) -> None:
    path = add(labels, "purged")
    assert give(labeler, path, "good").status == 303
    form = {**fields_of(labeler.get(path).text), "word": "bad", "by": "ann"}
    trace = (
        StoreReader(labels.store).select("SELECT trace_id FROM rollouts WHERE rollout_id = 'label-purged'").rows[0][0]
    )
    command = [
        sys.executable,
        "-m",
        "trainspan_cli",
        "store",
        "purge",
        "--trace",
        trace,
        "--yes",
        "--store",
        labels.store,
    ]
    environ = {**os.environ, "TRAINSPAN_HOME": str(labels.home)}
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environ)
    answer = labeler.post("/labels", form, authorization=f"Bearer {_runner(labeler)}")
    assert (answer.status, "was purged" in answer.text) == (404, True)
    rows = StoreReader(labels.store).select("SELECT * FROM evaluations WHERE rollout_id = 'label-purged'").rows
    assert rows == []
    assert labeler.get("/judges").status == 200


def test_labels_of_others_hide_no_persons_label_and_more_than_a_page_reads_is_an_error(
    labeler: Viewer, labels: World, own: RunningCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [add(labels, name) for name in ("flooded", "quiet")]
    ids = ["label-flooded", "label-quiet"]
    stale = {**fields_of(labeler.get(paths[0]).text), "word": "good", "by": "bob"}
    assert give(labeler, paths[0], "bad").status == 303
    agent = f"Bearer {token_of(labels.home / 'tokens.toml', Role.AGENT)}"
    forged = [Label(rollout_id, 0, "good", "eve", 1) for rollout_id in ids for _ in range(30)]
    send_labels(own.grpc, *forged, authorization=agent)
    store = StoreReader(labels.store)
    count = "SELECT count(*) FROM logs WHERE untrusted AND contains(attributes, 'eve')"
    assert store.select(count).rows == [(60,)]
    monkeypatch.setattr("trainspan_viewer.queries.labels.stored._MOST", 10)
    assert [label.by for label in stored_labels(store, ids)] == ["ann"]
    with pytest.raises(LabelChangedError, match="'bad' by ann"):
        give_label(Submission(**stale), store, _Nowhere())
    send_labels(own.grpc, *(Label(rollout_id, 0, "good", "ann", 2) for rollout_id in ids for _ in range(9)))
    assert len(stored_labels(store, ids)) == 19
    send_labels(own.grpc, Label(ids[1], 0, "bad", "ann", 3), Label(ids[1], 0, "bad", "ann", 4))
    with pytest.raises(TooManyLabelsError, match="rollout label-quiet has more than 10 labels"):
        stored_labels(store, ids)


def test_rollouts_that_others_forge_are_not_looked_at_in_the_queue(
    labels: World, own: RunningCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = "forged-run"
    agent = token_of(labels.home / "tokens.toml", Role.AGENT)
    forged = [chain(TestRollout(f"{run}-forged-{number}", run=run, round=0), 1) for number in range(9)]
    send(own.grpc, forged[:5], agent)
    labels.bench.send(*(chain(TestRollout(f"{run}-{number}", run=run, round=0), 1).reward(0.5) for number in range(2)))
    send(own.grpc, forged[5:], agent)
    monkeypatch.setattr("trainspan_viewer.queries.labels.queue._MOST", 3)
    store = StoreReader(labels.store)
    assert len(store.select(f"SELECT * FROM rollouts WHERE run_id = '{run}' AND untrusted").rows) == 9
    rows, is_cut = _rollouts(store, Params("", {}, {"run": [run]}))
    assert ({row["rollout_id"] for row in rows}, is_cut) == ({f"{run}-0", f"{run}-1"}, False)
    newest, _ = _rollouts(store, Params("", {}, {}))
    assert {f"{run}-0", f"{run}-1"} <= {row["rollout_id"] for row in newest}


class _Nowhere:
    """A collector that acknowledges and whose store is another one."""

    def obstacle(self) -> str | None:
        return None

    def send(self, labels: Any) -> None:
        self.sent: list[Label] = list(labels)


def test_a_label_that_the_pages_store_does_not_show_is_no_silent_loss(
    labels: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainspan_viewer.queries.labels.sending._SHOWN_S", 0.3)
    sender = _Nowhere()
    sent = Submission(rollout="label-clear:0", word="good", by="ann")
    with pytest.raises(NotShownError, match="another store than the collector's"):
        give_label(sent, StoreReader(labels.store), sender)
    assert [label.word for label in sender.sent] == ["good"]

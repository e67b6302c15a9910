"""Who may read the pages, and what other sites' pages cannot do."""

import http.client
import socket
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.tls import make_certificate
from tests.viewer.support.world import RUN, Viewer, World, serving
from trainspan_cli.clients.label_sender import CollectorLabels
from trainspan_schemas.config.settings import Settings, ViewSettings
from trainspan_schemas.errors import ConfigError, UsageError
from trainspan_schemas.store.roles import Role, token_of
from trainspan_viewer.queries.paths import ViewerPaths
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.queries.store import StoreReader
from trainspan_viewer.server.guard import Guard
from trainspan_viewer.server.process import serve

LINK: dict[str, Any] = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}


def test_without_a_token_no_client_reads(viewer: Viewer, world: World) -> None:
    for path in ("/", f"/runs/{RUN}", f"/datasets/{world.dataset}", "/live", "/nothing"):
        answer = viewer.get(path, authorized=False)
        assert answer.status == 401, path
        assert RUN not in answer.text
    assert viewer.get("/", authorization="Bearer wrong").status == 401
    assert viewer.get("/", authorized=False, cookie=f"trainspan-view={viewer.token}").status == 401
    assert viewer.get("/?key=wrong", authorized=False).status == 401
    assert viewer.get(f"/?key={viewer.token}", authorized=False).status == 401


def test_readers_and_runners_tokens_open_the_pages_and_no_other_roles(viewer: Viewer, world: World) -> None:
    file = world.home / "tokens.toml"
    found = {role: viewer.get("/", authorization=f"Bearer {token_of(file, role)}").status for role in Role}
    assert found == {Role.READER: 200, Role.RUNNER: 200, Role.AGENT: 401, Role.SERVING: 401, Role.USER: 401}


def test_the_cookie_opens_the_pages_of_this_start_and_nothing_else(viewer: Viewer, world: World) -> None:
    first = viewer.get(f"/runs/{RUN}?from=1&key={viewer.key}", authorized=False)
    assert (first.status, first.headers["location"]) == (303, f"/runs/{RUN}?from=1")
    cookie = first.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Lax", "Path=/"} <= set(cookie.split("; "))
    assert "Max-Age" not in cookie
    name, _, value = cookie.partition(";")[0].partition("=")
    assert value not in (viewer.key, *(token_of(world.home / "tokens.toml", role) for role in Role))
    for others in ("", "a[b]=1; ", "x={}; =; ;"):
        assert viewer.get("/", authorized=False, cookie=f"{others}{name}={value}").status == 200
    with serving(world.home, world.store, "--port", viewer.url.rpartition(":")[2], "--host", "127.0.0.2") as other:
        assert other.get("/", authorized=False, cookie=f"{name}={value}").status == 401


def test_a_link_with_the_key_keeps_what_else_it_asks(viewer: Viewer) -> None:
    answer = viewer.get(f"/compare?run=a&run=b%20c&key={viewer.key}&text=", authorized=False)
    assert (answer.status, answer.headers["location"]) == (303, "/compare?run=a&run=b+c&text=")
    assert viewer.get(f"/?key={viewer.key}", authorized=False).headers["location"] == "/"


def test_a_ticket_opens_the_pages_once() -> None:
    guard = Guard(frozenset(), (), 1)
    ticket = guard.ticket()
    assert [guard.opens(ticket), guard.opens(ticket), guard.opens(guard.key), guard.opens(guard.key)] == [
        True,
        False,
        True,
        True,
    ]


def test_an_empty_folder_stays_empty_and_its_pages_are_not_open_to_all(tmp_path: Path) -> None:
    with serving(tmp_path, str(tmp_path / "none.duckdb")) as running:
        assert running.get("/", authorized=False).status == 401
        assert running.get(f"/?key={running.key}", authorized=False).status == 303
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:8088"}, 200),
        ({"host": "127.0.0.1@evil.example"}, 421),
        ({"host": "127.0.0.1/static/"}, 421),
        ({"host": "127.0.0.1?x="}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({**LINK, "sec_fetch_dest": "iframe"}, 403),
        (LINK, 200),
        ({"sec_fetch_site": "same-origin"}, 200),
    ],
)
def test_other_hosts_and_other_sites_pages_are_refused(viewer: Viewer, headers: dict[str, Any], status: int) -> None:
    assert viewer.get("/", **headers).status == status


def test_every_answer_forbids_foreign_code_and_frames(viewer: Viewer) -> None:
    for path, authorized in (
        ("/", True),
        ("/", False),
        ("/nothing", True),
        ("/static/app.js", False),
        ("/?from=x&run=../x", True),
    ):
        headers = viewer.get(path, authorized=authorized).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_nothing_is_written_and_no_path_leads_out(viewer: Viewer) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert viewer.get("/", method=method).status in (404, 405)
    for path in (
        "/static/..%2f..%2fpyproject.toml",
        "/runs/..%2f..",
        "/datasets/..:round-0001",
        "/runs/%2e%2e",
        "/static/x",
    ):
        assert viewer.get(path).status == 404, path


def test_an_unchanged_page_is_not_sent_again(viewer: Viewer) -> None:
    first = viewer.get(f"/runs/{RUN}")
    again = viewer.get(f"/runs/{RUN}", if_none_match=first.headers["etag"])
    assert (first.status, again.status, again.text) == (200, 304, "")


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/runs/nothing", 404, "no run"),
        ("/datasets/nothing:round-0001", 404, "no run"),
        ("/datasets/round-9999", 404, "no dataset"),
        (f"/runs/{RUN}/records/99", 404, "no record"),
        ("/compare", 404, "no run was chosen"),
        (f"/runs/{RUN}?from=x", 400, "not a whole number"),
        ("/datasets/round-0001?least_reward=inf", 400, "not finite"),
        ("/datasets/round-0001?view=x", 400, "not one of"),
        (f"/datasets/round-0001?view=rollouts&text={'x' * 30_000}", 400, "at most"),
    ],
)
def test_a_wrong_address_is_answered_with_a_reason(viewer: Viewer, path: str, status: int, said: str) -> None:
    answer = viewer.get(path)
    assert (answer.status, said in answer.text) == (status, True)


def test_a_store_that_is_gone_is_said_and_the_run_pages_stay(world: World, tmp_path: Path) -> None:
    with serving(world.home, str(tmp_path / "none.duckdb"), "--run", "newest") as running:
        assert running.get("/").status == 200
        answer = running.get("/live")
        assert (answer.status, "no store at" in answer.text) == (503, True)


def test_with_tls_pages_and_cookie_are_only_for_tls(world: World, tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    with serving(world.home, world.store, tls_cert=made.certificate, tls_key=made.key) as running:
        assert running.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(made.certificate))
        connection = http.client.HTTPSConnection(running.url.removeprefix("https://"), context=context, timeout=30)
        connection.request("GET", f"/?key={running.key}")
        answer = connection.getresponse()
        assert (answer.status, "; Secure" in (answer.getheader("set-cookie") or "")) == (303, True)
        connection.close()
        with pytest.raises(OSError):  # noqa: PT011
            urllib.request.urlopen(running.url.replace("https", "http"), timeout=10)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (ViewSettings(host="0.0.0.0", port=0), "can be reached by other machines"),
        (ViewSettings(port=0, tls_cert="x.pem"), "are needed together"),
        (ViewSettings(host="0.0.0.0", port=0, open_to_all=True, insecure_allow_remote=True), "for this machine only"),
        (ViewSettings(port=0, token_file="/nowhere/tokens.toml"), "cannot be read"),
        (ViewSettings(port=0, tls_cert="/nowhere/c.pem", tls_key="/nowhere/k.pem"), "cannot be used"),
        (ViewSettings(port=70_000), "not between 0 and 65535"),
        (ViewSettings(host="no.such.host.invalid", port=0), "no address of this machine"),
    ],
)
def test_settings_that_would_open_the_pages_to_others_are_refused(
    settings: ViewSettings, said: str, tmp_path: Path
) -> None:
    sources = Sources(ViewerPaths(tmp_path, tmp_path), StoreReader("none"), Settings())
    with pytest.raises((ConfigError, UsageError), match=said):
        serve(
            settings, sources, CollectorLabels(Settings(), ()), lambda server: pytest.fail(f"it serves at {server.url}")
        )


def test_ipv6_and_a_name_are_judged_by_what_they_resolve_to(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(world.home, world.store, "--host", "::1") as running:
        assert running.url.startswith("http://[::1]:")
        assert running.get("/").status == 200
    lan = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: lan)
    sources = Sources(ViewerPaths(world.home, world.home), StoreReader("none"), Settings())
    with pytest.raises(ConfigError, match="can be reached by other machines"):
        serve(
            ViewSettings(host=socket.gethostname(), port=0),
            sources,
            CollectorLabels(Settings(), ()),
            lambda _: pytest.fail("it serves"),
        )

"""Several policy servers as one: what they count together, and which of them answer."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.training.support.swap_server import policy_server
from trainspan_loop.clients.policy_servers import PolicyServers
from trainspan_schemas.errors import PolicyServerError


def state(version: int, started_ns: int, **more: Any) -> dict[str, Any]:
    counts = {"calls_captured": 9, "calls_exported": 8, "calls_dropped": 1, "calls_refused": 2}
    counts |= {"internal_requests": 3, "internal_calls": 2}
    clock = {"started_ns": started_ns, "now_ns": time.time_ns()}
    return {"version": version, **clock, "changing": False, "policies": {}, **counts, **more}


def test_counts_are_sums_over_the_servers_that_ran_between_two_readings() -> None:
    with policy_server() as one, policy_server() as two:
        one.state, two.state = state(4, 100), state(4, 200, changing=True)
        servers = PolicyServers([one.url, two.url, "http://127.0.0.1:1"])
        before = servers.counts()
        total = before.total
        assert (total.captured, total.exported, total.dropped) == (18, 16, 6)
        assert (total.internal_requests, total.internal_calls) == (6, 4)
        assert total.answers == -6, "vLLM's metric, of which there is none here, without the servers' own requests"
        assert before.is_changing
        one.state = state(4, 100, calls_exported=11)
        two.state = state(4, 300)
        after = servers.counts()
        earlier, later, others = after.both(before)
        assert (earlier.exported, later.exported) == (8, 11)
        assert others == 2, "one was restarted, one never answered"
        assert servers.url == f"{one.url},{two.url},http://127.0.0.1:1"


def test_the_slowest_clock_of_the_servers_is_known() -> None:
    with policy_server() as one, policy_server() as two:
        one.state, two.state = state(4, 100, now_ns=time.time_ns() + 10**12), state(4, 200)
        two.state["now_ns"] = time.time_ns() - 5 * 10**9
        assert 5.0 <= PolicyServers([one.url, two.url]).counts().behind_ns / 1e9 < 8.0
        two.state["now_ns"] = time.time_ns() + 10**12
        assert PolicyServers([one.url, two.url]).counts().behind_ns == 0


def test_an_answer_that_is_cut_off_or_no_policy_server_s_is_that_of_a_server_that_is_away() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "6" if self.path == "/trainspan/policy" else "100")
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        servers = PolicyServers([f"http://127.0.0.1:{http.server_port}"], timeout_s=2)
        with pytest.raises(PolicyServerError, match="does not answer as a policy server: '<html>'"):
            servers.state()
        with pytest.raises(PolicyServerError, match="no answer"):
            servers.counts()
        assert not servers.is_healthy()
        http.shutdown()


def test_if_no_server_answers_they_are_asked_again_until_one_is_back() -> None:
    with policy_server() as gone:
        url = gone.url
    silences: list[float] = []
    servers = PolicyServers([url], timeout_s=2, retry_for_s=20, on_silence=lambda: silences.append(time.monotonic()))
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(servers.state)
        time.sleep(0.3)
        assert not asking.done()
        with policy_server(port=int(url.rpartition(":")[2])) as back:
            back.state = state(5, 1)
            assert asking.result(timeout=20).alone.version == 5
    assert silences, "whoever started it can start it again"


def test_a_server_that_is_away_is_left_out_and_the_newest_version_is_that_of_all() -> None:
    with policy_server() as one:
        one.state = state(3, 100)
        with policy_server() as two:
            two.state = state(4, 200)
            servers = PolicyServers([one.url, two.url], timeout_s=2)
            assert servers.state().alone.version == 4
            assert servers.is_healthy()
        assert servers.state().alone.version == 3
        assert [*servers.states()] == [one.url]
        assert servers.counts().total.captured == 9
        assert servers.is_healthy()
    assert not servers.is_healthy()
    for ask in (servers.state, servers.counts, servers.states):
        with pytest.raises(PolicyServerError, match="no answer from the policy server at"):
            ask()


def test_the_newest_of_several_policies_counts() -> None:
    with policy_server() as one, policy_server() as two:
        one.state = state(0, 1, policies={"writer": {"version": 2}, "critic": {"version": 1}})
        two.state = state(0, 2, policies={"writer": {"version": 2}, "critic": {"version": 3}})
        assert PolicyServers([one.url, two.url]).state().of("critic").version == 3

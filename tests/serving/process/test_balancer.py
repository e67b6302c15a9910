"""nginx with the example configuration: what belongs to a rollout stays together, and a server that is away is left out."""

from pathlib import Path

from tests.support.agents.openai_server import OpenAIServer
from tests.support.policy_server.balancer import balancer
from tests.support.policy_server.process import RunningServer

CHAT = "/v1/chat/completions"


def trace(number: int) -> str:
    return f"00-{number + 1:032x}-{'12' * 8}-01"


def test_all_requests_of_a_rollout_reach_one_server_however_they_name_it(tmp_path: Path) -> None:
    with OpenAIServer() as one, OpenAIServer() as two:
        servers = (one, two)
        with balancer(tmp_path, *(server.url.removesuffix("/v1") for server in servers)) as url:
            front = RunningServer(url, Path(), None, Path())  # type: ignore[arg-type]

            def ask(path: str, **headers: str) -> int:
                """The server that got the request."""
                before = [len(server.requests) for server in servers]
                assert front.post(path, {"model": "policy"}, headers)[0] == 200
                return [len(server.requests) - n for server, n in zip(servers, before, strict=True)].index(1)

            reached = []
            for number in range(24):
                parent = trace(number)
                by_baggage = {ask(CHAT, baggage=f"other=1,trainspan.rollout.id=r{number};x=y") for _ in range(2)}
                both = ask(
                    f"/rollout/{parent}.sig{CHAT}", baggage=f"trainspan.rollout.id=r{number}", traceparent=trace(99)
                )
                by_trace = {
                    ask(f"/rollout/{parent}.sig{CHAT}"),
                    ask(CHAT, Authorization=f"Bearer trainspan-{parent}.sig"),
                    ask("/v1/messages", **{"x-api-key": f"trainspan-{parent}.sig"}),
                    ask(CHAT, traceparent=parent),
                    ask(f"/rollout/{parent}/v1/messages", **{"x-api-key": "k"}),
                }
                assert by_baggage == {both}, "the id comes before the trace"
                assert len(by_trace) == 1
                reached += [*by_baggage, *by_trace]
            assert 6 < reached.count(0) < 42, (
                "half of 48 has a standard deviation of 4, with the uneven parts of the ring"
            )
            assert front.post("/trainspan/policy", {})[0] == 403


def test_a_server_that_is_away_or_restarts_is_left_out_and_its_rollouts_come_back(tmp_path: Path) -> None:
    with OpenAIServer() as one:
        two = OpenAIServer().__enter__()
        two_url = two.url
        with balancer(tmp_path, one.url.removesuffix("/v1"), two_url.removesuffix("/v1")) as url:
            front = RunningServer(url, Path(), None, Path())  # type: ignore[arg-type]

            def run(n_rollouts: int) -> set[int]:
                asked = (
                    front.post(CHAT, {}, {"baggage": f"trainspan.rollout.id=r{number}"})[0]
                    for number in range(n_rollouts)
                )
                return set(asked)

            assert run(20) == {200}
            assert len(one.requests) + len(two.requests) == 20
            own = len(two.requests)
            assert own > 0
            two.status = lambda _number: 503
            before = len(one.requests)
            assert run(20) == {200}, "what a server does not take goes to the next one"
            assert len(one.requests) == before + 20
            two.__exit__(None, None, None)
            assert run(20) == {200}

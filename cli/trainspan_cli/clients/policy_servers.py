"""The policy servers of a loop, as one: its own server, or several behind a balancer, of which some may be away."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from trainspan_cli.clients.policy_server import PolicyClient
from trainspan_schemas.errors import PolicyServerError

__all__ = ["PolicyServers", "ServerCounts"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What the servers that answer counted since they started, summed."""

    processes: frozenset[tuple[str, int]]
    """URL and start of each: counts are comparable only between equal processes."""
    requests: int
    """Successful requests by vLLM's metric, without the server's own."""
    internal_requests: int
    """The server's own, such as canaries."""
    captured: int
    exported: int
    dropped: int
    """Calls that a server dropped or the collector refused."""
    sampled_tokens: int
    is_changing: bool
    """Whether one of them swaps at the moment."""


class PolicyServers:
    """`urls` are the servers' roots, e.g. http://127.0.0.1:8000."""

    def __init__(self, urls: Sequence[str], timeout_s: float = 10.0) -> None:
        self._clients = [PolicyClient(url, timeout_s) for url in urls]

    @property
    def url(self) -> str:
        """All URLs with commas, as `[train] policy_url` names several servers."""
        return ",".join(client.url for client in self._clients)

    def is_healthy(self) -> bool:
        """Whether one of them answers and is ready."""
        return any(self._each(PolicyClient.is_healthy))

    def policy(self) -> dict[str, Any]:
        """The state of the server with the newest versions. Raises PolicyServerError if none answers."""
        return max(self.states().values(), key=_versions)

    def states(self) -> dict[str, dict[str, Any]]:
        """URL → state of each server that answers. Raises PolicyServerError if none does."""
        return dict(self._answers(lambda client: (client.url, client.policy())))

    def counts(self) -> ServerCounts:
        """Raises PolicyServerError if no server answers."""
        found = self._answers(_counts)
        return ServerCounts(
            frozenset().union(*(one.processes for one in found)),
            sum(one.requests for one in found),
            sum(one.internal_requests for one in found),
            sum(one.captured for one in found),
            sum(one.exported for one in found),
            sum(one.dropped for one in found),
            sum(one.sampled_tokens for one in found),
            any(one.is_changing for one in found),
        )

    def sleep(self) -> None:
        """Has them release their accelerators' memory for the trainer; requests are held until `wake` or a swap."""
        self._each(PolicyClient.sleep)

    def wake(self) -> None:
        """Has them take their memory back; does nothing to those that are awake."""
        self._each(PolicyClient.wake)

    def _answers(self, ask: Callable[[PolicyClient], _T]) -> list[_T]:
        """What the servers answer, without those that do not. Raises PolicyServerError if none does."""

        def answer(client: PolicyClient) -> _T | PolicyServerError:
            try:
                return ask(client)
            except PolicyServerError as error:
                return error

        found = self._each(answer)
        answers = [one for one in found if not isinstance(one, PolicyServerError)]
        if not answers:
            raise next(one for one in found if isinstance(one, PolicyServerError))
        return answers

    def _each(self, ask: Callable[[PolicyClient], _T]) -> list[_T]:
        with ThreadPoolExecutor(len(self._clients)) as pool:
            return list(pool.map(ask, self._clients))


def _counts(client: PolicyClient) -> ServerCounts:
    requests, tokens, state = client.successful_requests(), client.sampled_tokens(), client.policy()
    internal = state["internal_requests"]
    return ServerCounts(
        frozenset({(client.url, state["started_ns"])}),
        requests - internal,
        internal,
        state["calls_captured"],
        state["calls_exported"],
        state["calls_dropped"] + state["calls_refused"],
        tokens,
        state["changing"],
    )


def _versions(state: dict[str, Any]) -> tuple[int, ...]:
    return state["version"], *(own["version"] for own in (state.get("policies") or {}).values())

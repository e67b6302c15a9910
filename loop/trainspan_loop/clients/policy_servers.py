"""The policy servers of a loop, as one: its own server, or several behind a balancer, of which some may be away."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Final, TypeVar

from trainspan_loop.clients.policy_server import PolicyClient
from trainspan_schemas.errors import PolicyServerError
from trainspan_schemas.policy_server import ServerState

__all__ = ["PolicyServers", "Readings", "ServerCounts"]

_RETRY_S: Final = 0.5
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What one server, or several together, counted since they started or between two readings."""

    answers: int = 0
    """Successful answers by vLLM's metric, one for each choice, without the server's own."""
    internal_requests: int = 0
    """The server's own: canaries, and the one that fixes the grammar library."""
    internal_calls: int = 0
    """Those of them that are captured and exported as calls: canaries."""
    captured: int = 0
    exported: int = 0
    dropped: int = 0
    """Calls that a server dropped or the collector refused."""
    sampled_tokens: int = 0

    def __add__(self, other: "ServerCounts") -> "ServerCounts":
        return ServerCounts(*(value + more for value, more in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "ServerCounts") -> "ServerCounts":
        return ServerCounts(*(value - less for value, less in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Readings:
    """The counts of the servers that answered, at one time."""

    servers: int
    """Number of servers, with those that did not answer."""
    counts: Mapping[tuple[str, int], ServerCounts]
    """By URL and start of the server: counts are comparable only between equal processes."""
    is_changing: bool = False
    """Whether one of them swaps at the moment."""
    behind_ns: int = 0
    """How far the slowest of their clocks is behind the one here, by which calls of now seem to have begun earlier."""

    @property
    def total(self) -> ServerCounts:
        return sum(self.counts.values(), ServerCounts())

    def both(self, earlier: "Readings") -> tuple[ServerCounts, ServerCounts, int]:
        """Earlier and later counts of the servers that ran from one reading to the other, and the number of the others."""
        common = self.counts.keys() & earlier.counts.keys()
        before = sum((earlier.counts[server] for server in common), ServerCounts())
        now = sum((self.counts[server] for server in common), ServerCounts())
        return before, now, self.servers - len(common)


class PolicyServers:
    """`urls` are the servers' roots, e.g. http://127.0.0.1:8000. If none of them answers, they are asked for `retry_for_s`, and
    `on_silence` is called before each time."""

    def __init__(
        self,
        urls: Sequence[str],
        timeout_s: float = 10.0,
        *,
        retry_for_s: float = 0.0,
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        self._clients = [PolicyClient(url, timeout_s) for url in urls]
        self._on_silence = on_silence
        self._retry_for_s = retry_for_s

    @property
    def url(self) -> str:
        """All URLs with commas, as `[train] policy_url` names several servers."""
        return ",".join(client.url for client in self._clients)

    def is_healthy(self) -> bool:
        """Whether one of them answers and is ready."""
        return any(self._each(PolicyClient.is_healthy))

    def state(self) -> ServerState:
        """The state of the server with the newest versions. Raises PolicyServerError if none answers."""
        return max(self.states().values(), key=lambda state: state.versions)

    def states(self) -> dict[str, ServerState]:
        """URL → state of each server that answers. Raises PolicyServerError if none does."""
        return dict(self._answers(lambda client: (client.url, client.state())))

    def counts(self) -> Readings:
        """Raises PolicyServerError if no server answers."""
        answers = self._answers(_counts)
        return Readings(
            len(self._clients),
            {(url, started_ns): counts for url, started_ns, counts, *_ in answers},
            any(is_changing for *_, is_changing, _ in answers),
            max(behind_ns for *_, behind_ns in answers),
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

        deadline = time.monotonic() + self._retry_for_s
        while True:
            outcomes = self._each(answer)
            answers = [outcome for outcome in outcomes if not isinstance(outcome, PolicyServerError)]
            if answers:
                return answers
            if time.monotonic() >= deadline:
                raise next(outcome for outcome in outcomes if isinstance(outcome, PolicyServerError))
            time.sleep(_RETRY_S)
            self._on_silence()

    def _each(self, ask: Callable[[PolicyClient], _T]) -> list[_T]:
        with ThreadPoolExecutor(len(self._clients)) as pool:
            return list(pool.map(ask, self._clients))


def _counts(client: PolicyClient) -> tuple[str, int, ServerCounts, bool, int]:
    """URL, start, counts, whether the server swaps at the moment, and how far its clock is behind."""
    answers, tokens, asked_ns = client.successful_answers(), client.sampled_tokens(), time.time_ns()
    state = client.state()
    counts = ServerCounts(
        answers - state.internal_requests,
        state.internal_requests,
        state.internal_calls,
        state.calls.captured,
        state.calls.exported,
        state.calls.dropped + state.calls.refused,
        tokens,
    )
    return client.url, state.started_ns, counts, state.changing, max(0, asked_ns - state.now_ns)

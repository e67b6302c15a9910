"""Asks the policy servers about an attempt at a rollout: the calls that they began, what they refused, and whether they failed it. An
agent only claims any of it."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from trainspan_schemas.http_client import ask
from trainspan_schemas.telemetry.failures import RequestFailures, attempt_key, failures_path
from trainspan_schemas.telemetry.identity import Identity

__all__ = ["PolicyWitness", "Testimony"]

ANSWER_S: Final = 5.0
ASKED_AGAIN_S: Final = 60.0
SILENCE_S: Final = 10.0
"""How long a server that did not answer is not asked again: each question would hold up the end of an attempt."""
_MOST_QUESTIONS: Final = 32
_MAX_BYTES: Final = 16 * 1024
_NO_TRACE: Final = "0" * 32


@dataclass(frozen=True, slots=True)
class _Silence:
    """A server that does not answer at all."""

    why: str


@dataclass(frozen=True, slots=True)
class Testimony:
    """What the servers say of an attempt, by URL; None: it is none of `trainspan serve` and cannot tell."""

    answers: dict[str, RequestFailures | _Silence | None]

    @property
    def _reports(self) -> list[RequestFailures]:
        return [answer for answer in self.answers.values() if isinstance(answer, RequestFailures)]

    @property
    def calls(self) -> int | None:
        """The calls that they began; None if one of them cannot be asked."""
        reports = self._reports
        return sum(answer.calls for answer in reports) if len(reports) == len(self.answers) else None

    @property
    def has_overflown(self) -> bool:
        """Whether one refused a prompt that does not fit into the context."""
        return any(answer.overflows for answer in self._reports)

    @property
    def refusal(self) -> str | None:
        """Why one refused the last request that it refused."""
        return next((answer.refusal for answer in self._reports if answer.refusal), None)

    def lack_of_calls(self) -> str | None:
        """Says that they began no call of the attempt, and what they got instead; None if they began one or cannot tell."""
        if self.calls != 0:
            return None
        reports = self._reports
        if unsigned := sum(answer.unsigned for answer in reports):
            return (
                f"its {unsigned} model calls came without the runner's signature, and cannot be trained: pass on the whole base "
                "URL, and give the policy server the runner's key ([serving] signing_key_file)"
            )
        unnamed = sum(answer.unnamed for answer in reports)
        others = f" ({unnamed} calls, of whomever, named no rollout)" if unnamed else ""
        return f"no model call of it reached the policy server{others}: the agent must use the base URL that it gets"

    def failure(self, duration_s: float) -> str | None:
        """How they failed an attempt that began `duration_s` ago; None if they did not.

        One server of several that does not answer, or was started meanwhile, need not have had any of its calls.
        """
        is_only = len(self.answers) == 1
        for url, answer in self.answers.items():
            if isinstance(answer, RequestFailures):
                if answer.failures:
                    return f"the policy server at {url} failed {answer.failures} of its requests"
                if answer.up_s < duration_s and (is_only or answer.calls):
                    return f"the policy server at {url} was started meanwhile"
        silent = [
            f"the policy server at {url} {answer.why}"
            for url, answer in self.answers.items()
            if isinstance(answer, _Silence)
        ]
        return silent[0] if len(silent) == len(self.answers) else None


class PolicyWitness:
    """The policy servers as witnesses."""

    def __init__(self, policy_urls: Sequence[str]) -> None:
        self._servers = [url.rstrip("/").removesuffix("/v1") for url in policy_urls]
        self._ours: set[str] = set()
        """Those that have told something; others are told no rollout ids."""
        self._others: dict[str, float] = {}
        """Those that could not tell or did not answer → when they are asked again: a gateway may answer for a server that starts."""
        self._threads = ThreadPoolExecutor(_MOST_QUESTIONS, "policy-witness")

    async def ask(self, identity: Identity, trace_id: str) -> Testimony:
        """Asks all servers about the attempt with this trace."""
        loop = asyncio.get_running_loop()
        questions = [loop.run_in_executor(self._threads, self._ask, each, identity, trace_id) for each in self._servers]
        answers = await asyncio.gather(*questions)
        return Testimony(dict(zip(self._servers, answers, strict=True)))

    async def asked_again(self, seen: Testimony) -> Testimony:
        """`seen`, with whether those that cannot tell still answer."""
        unknown = [server for server, answer in seen.answers.items() if answer is None]
        loop = asyncio.get_running_loop()
        statuses = await asyncio.gather(*(loop.run_in_executor(self._threads, _status, each) for each in unknown))
        silent = {
            server: _Silence("cannot be reached")
            for server, status in zip(unknown, statuses, strict=True)
            if status is None
        }
        return Testimony({**seen.answers, **silent})

    def _ask(self, server: str, identity: Identity, trace_id: str) -> RequestFailures | _Silence | None:
        began = time.monotonic()
        if began < self._others.get(server, 0.0):
            return None
        answer = _answer(server, _NO_TRACE) if server not in self._ours else None
        if server in self._ours or isinstance(answer, RequestFailures):
            self._ours.add(server)
            answer = _answer(server, trace_id, attempt_key(identity.rollout_id, identity.attempt))
        elif answer is None:
            self._others[server] = began + ASKED_AGAIN_S
        if isinstance(answer, _Silence) and time.monotonic() - began >= ANSWER_S:
            self._others[server] = time.monotonic() + SILENCE_S
        return answer


def _answer(server: str, *keys: str) -> RequestFailures | _Silence | None:
    try:
        answer = ask(server + failures_path(*keys), timeout_s=ANSWER_S, max_bytes=_MAX_BYTES)
    except ConnectionError as error:
        return _Silence(f"cannot be reached: {error}")
    if not answer.is_ok:
        # A gateway may have an error of its own at this path.
        is_failing = answer.status >= 500 and (_status(server) or 500) >= 500
        return _Silence(f"answered {answer.status}") if is_failing else None
    try:
        return RequestFailures.from_json(answer.body)
    except ValueError:
        return None


def _status(server: str) -> int | None:
    """The status of its answer to a simple request; None if it cannot be reached."""
    try:
        return ask(f"{server}/v1/models", timeout_s=ANSWER_S, max_bytes=_MAX_BYTES).status
    except ConnectionError:
        return None

"""Executes branches: the policy server repeats the stored calls to the agent, then says whether the agent followed them."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from trainspan_rollouts.executors.executor import Ended, Execution, Executor
from trainspan_schemas.artifacts.branches import BranchPoint, BranchSource
from trainspan_schemas.errors import InvalidRecordError, PolicyServerError, ProcessError
from trainspan_schemas.http_client import Answer, ask
from trainspan_schemas.telemetry.identity import Identity
from trainspan_schemas.telemetry.prefix import LONGEST_LIFE_S, PREFIX_PATH, Branched, ForcedPrefix, signed_request

__all__ = ["Branching"]

_MARGIN_S: Final = 300.0
"""How long the server keeps a prefix beyond the agent's timeout."""
_ANSWER_S: Final = 30.0
_FORGET_S: Final = 3.0
"""How long an interrupted run waits for the server to forget a branch."""


class Branching:
    """Registers each attempt at a branch before its agent starts, and ends it afterwards.

    With several servers the prefix is registered at each that answers. All calls of one rollout should reach the same one;
    if a branch may only seem to have diverged because they did not, the attempt ends as `infra_error`.
    """

    def __init__(self, source: BranchSource, policy_urls: Sequence[str], key: bytes, timeout_s: float) -> None:
        """`key` signs the requests; `timeout_s` is the agents'."""
        self._source, self._key = source, key
        self._servers = [url.rstrip("/").removesuffix("/v1") for url in policy_urls]
        self._lives_s = min(timeout_s + _MARGIN_S, LONGEST_LIFE_S)

    async def execute(self, point: BranchPoint, execution: Execution, executor: Executor) -> Ended:
        """Executes the agent from `point`; status `diverged` if it did not repeat the stored calls.

        Raises ProcessError if no branch can work: the server is not ours, or has another key.
        """
        identity = execution.identity
        stored = await asyncio.to_thread(self._source.calls, point)
        prefix = ForcedPrefix(
            identity.rollout_id,
            identity.attempt,
            execution.parent.trace_id,
            stored.repeated,
            stored.later,
            stored.point,
            self._lives_s,
        )
        registering = asyncio.create_task(asyncio.to_thread(self._register, prefix))
        try:
            servers, away = await asyncio.shield(registering)
            ended = await executor.execute(replace(execution, answered_s=point.answered_s))
            branched = await asyncio.to_thread(self._end, identity, servers, away)
        except PolicyServerError as error:
            return Ended("infra_error", 0.0, error=str(error))
        except asyncio.CancelledError:
            await self._forget(identity, registering)
            raise
        return _judged(ended, point, branched)

    def _register(self, prefix: ForcedPrefix) -> tuple[list[str], PolicyServerError | None]:
        """Returns the servers that have the prefix, and why another has not. Raises PolicyServerError if none has."""
        body, servers, failure = prefix.to_json(), [], None
        for server in self._servers:
            try:
                self._post(server, PREFIX_PATH, body)
                servers.append(server)
            except PolicyServerError as error:
                failure = error
        if failure is not None and not servers:
            raise failure
        return servers, failure

    def _end(self, identity: Identity, servers: Sequence[str], away: PolicyServerError | None) -> Branched:
        """Returns what became of the branch, summed over the servers: usually one has seen all calls, after an outage several.

        Raises PolicyServerError if the branch may only seem to diverge, because calls may have reached a server that does
        not answer or never had the prefix (`away`), or because a server did not see where it began.
        """
        body = json.dumps({"rollout": identity.rollout_id, "attempt": identity.attempt}).encode()
        ends, lost = [], None
        for server in servers:
            try:
                ends.append(Branched.from_json(self._post(server, f"{PREFIX_PATH}/end", body)))
            except InvalidRecordError as error:
                lost = PolicyServerError(f"{server} answered {error}")
            except PolicyServerError as error:
                lost = error
        forced, sampled = sum(end.forced for end in ends), sum(end.sampled for end in ends)
        total = max((end.forced + end.missing for end in ends), default=0)  # each server was to repeat all
        missing = max(0, total - forced)
        diverged = next((end for end in ends if end.diverged), None)
        failure = lost or (away if diverged is None else None)
        if failure is not None and (diverged or missing or not sampled):
            raise failure
        # After a branch has begun any call is right, but a server that did not see it begin refuses them.
        if diverged and sampled > diverged.sampled:
            raise PolicyServerError(f"the calls of one branch reached several policy servers: {diverged.diverged}")
        return Branched(forced, missing, sampled, diverged.diverged if diverged else None)

    async def _forget(
        self, identity: Identity, registering: asyncio.Task[tuple[list[str], PolicyServerError | None]]
    ) -> None:
        """Ends the branch of an agent that was stopped; otherwise it expires."""
        with contextlib.suppress(PolicyServerError, ProcessError, TimeoutError):
            async with asyncio.timeout(_FORGET_S):
                servers, _ = await asyncio.shield(registering)
                await asyncio.to_thread(self._end, identity, servers, None)

    def _post(self, server: str, path: str, body: bytes) -> bytes:
        """Raises PolicyServerError if it may work the next time, ProcessError if it never will."""
        headers = {"Content-Type": "application/json", **signed_request(self._key, path, body)}
        try:
            answer = ask(server + path, body, headers, timeout_s=_ANSWER_S)
        except ConnectionError as error:
            raise PolicyServerError(f"the policy server at {server} cannot be reached: {error}") from error
        if answer.is_ok:
            return answer.body
        reason = _reason(answer)
        if answer.status == 401:
            raise ProcessError(
                f"the policy server at {server} refuses to branch rollouts: {reason}; give it the runner's key "
                "([serving] signing_key_file)"
            )
        if path == PREFIX_PATH and answer.status in (404, 405):
            raise ProcessError(f"{server} cannot branch rollouts: serve the policy with `trainspan serve`")
        raise PolicyServerError(f"the policy server at {server} answered {answer.status}: {reason}")


def _judged(ended: Ended, point: BranchPoint, branched: Branched) -> Ended:
    """The end of an agent that was to repeat the stored calls and then to make the call at `point`.

    One that did not get there, also because its time was over, says nothing about the state.
    """
    if ended.status not in ("ok", "agent_error", "timeout"):
        return ended
    why, end = branched.diverged, "timed out" if ended.status == "timeout" else "ended"
    if why is None:
        if branched.missing:
            why = f"the agent {end} before {branched.missing} of the stored answers were asked for"
        elif not branched.sampled:
            why = f"the agent {end} without call {point.call}"
    return ended if why is None else replace(ended, status="diverged", error=why)


def _reason(answer: Answer) -> str:
    try:
        return str(json.loads(answer.body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return answer.text

"""Makes the attempts at a rollout: agent, judge, verdict; an infrastructure failure is tried again."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from trainspan_rollouts.executors.branching import Branching
from trainspan_rollouts.executors.executor import Ended, Execution, Executor
from trainspan_rollouts.executors.policy_witness import PolicyWitness, Testimony
from trainspan_rollouts.groups import Groups
from trainspan_rollouts.judges.judge import Judge, Judgment, Result
from trainspan_rollouts.ledger.run_ledger import RunLedger
from trainspan_rollouts.plan import PlannedRollout
from trainspan_rollouts.records import RunSettings
from trainspan_rollouts.rollout_spans import RolloutSpans
from trainspan_schemas.agents.functions import number_of
from trainspan_schemas.telemetry.identity import Identity
from trainspan_schemas.telemetry.keys import REWARD
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["Attempts", "Verdict"]

RETRY_DELAY_S: Final = 0.5
"""Delay before the first retry; doubled for each further one."""
_MOST_WARNINGS: Final = 20
"""Kinds of failures that are logged as warnings."""
_LONGEST_LOGGED: Final = 1000
"""Characters of an error: an agent's text may have any length."""

_JUDGED: Final = ("ok", "judge_error")
"""Statuses of rollouts that a judge has seen."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of an attempt."""

    status: RolloutStatus
    scores: dict[str, float]
    source: str
    """Whose reward it is: `judge`, `agent` or `return`."""
    reward: float | None
    error: str | None
    """Also of an `ok` rollout, whose reward cannot be used."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Evaluation name → the judge's reason for its score."""


class Attempts:
    """Makes attempts, at most `concurrency` at a time.

    Calls `on_calls` with the number of model calls of each one, and whether its agent reported it. If it ended before it could, it is
    the number that the policy servers began; None if they cannot tell either.
    """

    def __init__(
        self,
        settings: RunSettings,
        key: bytes,
        executor: Executor,
        judge: Judge | None,
        ledger: RunLedger,
        spans: RolloutSpans,
        on_calls: Callable[[int | None, bool], None],
        branching: Branching | None = None,
    ) -> None:
        self._settings = settings
        self._executor = executor
        self._judge = judge
        self._ledger = ledger
        self._spans = spans
        self._on_calls = on_calls
        self._branching = branching
        self._witness = PolicyWitness(settings.policy_servers or (settings.policy_url,))
        self._agents = asyncio.Semaphore(settings.concurrency)
        self._groups = Groups(judge, settings.n) if judge is not None and judge.compares else None
        self._key = key
        self._logged: set[str] = set()

    async def rollout(self, planned: PlannedRollout) -> Verdict:
        """Makes all attempts at one rollout; returns the last verdict."""
        verdict = await self._last_verdict(planned)
        if self._groups is not None and verdict.status not in _JUDGED:
            self._groups.leave(planned.task, planned.identity)
        return verdict

    async def _last_verdict(self, planned: PlannedRollout) -> Verdict:
        failures = 0
        while True:
            is_last = failures >= self._settings.retries
            verdict, blameless = await self._attempt(planned, is_last=is_last)
            if verdict.status != "infra_error":
                return verdict
            if not blameless:
                if is_last:
                    return verdict
                failures += 1
                await asyncio.sleep(RETRY_DELAY_S * 2 ** (failures - 1))
            identity = replace(planned.identity, attempt=planned.identity.attempt + 1)
            planned = replace(planned, identity=identity)

    async def _attempt(self, planned: PlannedRollout, *, is_last: bool) -> tuple[Verdict, bool]:
        identity, number = planned.identity, planned.number
        await self._agents.acquire()
        span = self._spans.begin_rollout(identity, self._settings.n, planned.point, planned.task.answer)
        judge = self._judge.name if self._judge else None
        self._ledger.record_start(identity, number, planned.task.digest(), span.if_killed(judge))
        try:
            signed = identity.signed(self._key, span.parent)
            token = f"{span.parent}.{signed.url_signature}"
            execution = Execution(planned.task, signed, span.parent, token)
            try:
                ended = await self._executed(planned, execution)
                seen = await self._witness.ask(identity, span.parent.trace_id)
                ended = self._completed(await self._explained(ended, seen, is_last=is_last), seen)
                verdict = await self._judged(planned, ended)
            finally:
                await self._executor.release(execution)
        except asyncio.CancelledError:
            self._ledger.record_end(identity, number, "cancelled", None)
            span.end("cancelled", judge=judge, error="the run was stopped")
            raise
        calls = ended.report.calls if ended.report else None
        # Servers without the runner's key count no call as the rollout's: then nobody can tell but the agent.
        served = None if seen.calls == 0 and calls else seen.calls
        counted = served if calls is None else calls
        if calls is not None and served is not None and calls > served:
            counted = served
            warning = f"its agent reports {calls} calls, the policy servers began {served}: theirs count"
            self._log_once("calls", "calls_unknown_to_servers", identity, warning)
        self._on_calls(counted, calls is not None)
        self._ledger.record_end(identity, number, verdict.status, verdict.reward)
        span.end(
            verdict.status,
            calls=calls,
            served_calls=served,
            judge=judge,
            scores=verdict.scores,
            source=verdict.source,
            error=verdict.error,
            reasons=verdict.reasons,
        )
        self._log_failure(verdict, identity)
        if verdict.status == "ok" and seen.has_overflown:
            self._log_once("overflow", "prompt_too_long", identity, f"it ended ok after a refusal: {seen.refusal}")
        return verdict, ended.blameless

    async def _executed(self, planned: PlannedRollout, execution: Execution) -> Ended:
        try:
            if self._branching is None or planned.point is None:
                return await self._executor.execute(execution)
            return await self._branching.execute(planned.point, execution, self._executor)
        finally:
            self._agents.release()

    async def _explained(self, ended: Ended, seen: Testimony, *, is_last: bool) -> Ended:
        """Whose failure it was. What only an agent says is a reason to try again, but no excuse in the end."""
        if ended.status != "agent_error":
            return ended
        asks_again = ended.asks_again
        if ended.report is not None and ended.report.policy_failing:
            failure = (await self._witness.asked_again(seen)).failure(ended.duration_s)
            if failure is not None:
                return replace(ended, status="infra_error", error=f"{ended.error}; {failure}")
            asks_again = True
        if asks_again and not is_last:
            return replace(ended, status="infra_error", error=f"{ended.error}; it is tried again")
        return ended

    def _completed(self, ended: Ended, seen: Testimony) -> Ended:
        """With what only the servers know: that they began no call of it, that its prompt was too long, what they refused."""
        lack = seen.lack_of_calls()
        if ended.status == "ok":
            if lack is None or self._settings.allow_no_calls:
                return ended
            return replace(ended, status="infra_error", error=f"{lack} (allow_no_calls accepts such rollouts)")
        if ended.status in ("cancelled", "diverged"):
            return ended
        refusal = f"the policy server's last refusal: {seen.refusal}" if seen.refusal else None
        is_overflow = ended.status == "agent_error" and seen.has_overflown
        error = "; ".join(filter(None, (ended.error, refusal, lack)))
        return replace(ended, status="context_overflow" if is_overflow else ended.status, error=error)

    async def _judged(self, planned: PlannedRollout, ended: Ended) -> Verdict:
        """Returns the judge's reward, otherwise the agent's own, otherwise the number that the function returned."""
        if ended.status != "ok":
            return Verdict(ended.status, {}, "judge", None, ended.error)
        if self._judge is not None:
            try:
                judgment = await self._judgment(planned, ended, self._judge)
            except Exception as error:  # noqa: BLE001 - user code: its failure becomes a status
                text = f"judge {self._judge.name}: {type(error).__name__}: {' '.join(str(error).split())}"
                return Verdict("judge_error", {}, "judge", None, text)
            scores = judgment.scores
            if outside := self._outside(*scores.values()):
                return Verdict("judge_error", {}, "judge", None, f"judge {self._judge.name}: {outside}")
            why_none = None if scores else judgment.reasons.get(REWARD)
            return Verdict("ok", scores, "judge", scores.get(REWARD), why_none, judgment.reasons)
        if ended.report and ended.report.rewards:
            total = sum(map(float, ended.report.rewards))
            outside = self._outside(*ended.report.rewards, total)
            return Verdict("ok", {}, "agent", None if outside else total, outside)
        if isinstance(ended.value, (int, float)):
            try:
                score = number_of(ended.value, "the agent")
            except ValueError as error:
                return Verdict("ok", {}, "return", None, str(error))
            outside = self._outside(score)
            return Verdict("ok", {REWARD: score}, "return", None if outside else score, outside)
        return Verdict("ok", {}, "return", None, None)

    async def _judgment(self, planned: PlannedRollout, ended: Ended, judge: Judge) -> Judgment:
        identity = planned.identity
        result = Result(
            ended.status,
            ended.value,
            ended.stdout_tail,
            ended.exit_code,
            ended.duration_s,
            identity.rollout_id,
            ended.workdir,
        )
        if self._groups is not None:
            return await self._groups.judge(planned.task, identity, planned.number, result)
        return await judge.judge(planned.task.for_judge(), result)

    def _outside(self, *rewards: float) -> str | None:
        """Names the first reward that is beyond the limit; None if there is none."""
        limit = self._settings.max_reward
        outlier = next((reward for reward in rewards if not abs(reward) <= limit), None)
        return (
            None if outlier is None else f"a reward of {outlier:g} is beyond [advanced] dataset.max_reward = {limit:g}"
        )

    def _log_failure(self, verdict: Verdict, identity: Identity) -> None:
        """Logs each kind of failure once as a warning, and every repetition at debug level."""
        if verdict.error is not None:
            error = verdict.error[:_LONGEST_LOGGED]
            self._log_once(f"{verdict.status}: {error}", f"rollout_failed status={verdict.status}", identity, error)

    def _log_once(self, sort: str, event: str, identity: Identity, error: str) -> None:
        level = logging.DEBUG if sort in self._logged or len(self._logged) >= _MOST_WARNINGS else logging.WARNING
        self._logged.add(sort)
        ids = identity.task_id, identity.rollout_id, identity.attempt
        _log.log(level, "event=%s task=%s rollout=%s attempt=%d error=%r", event, *ids, error)

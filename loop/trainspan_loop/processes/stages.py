"""The stages of a round, each a `trainspan` command or the trainer's work: rollouts, dataset, training."""

import contextlib
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar, cast

from trainspan_loop.checks.integrity import stage_checks, stored_checks
from trainspan_loop.checks.stage_counts import (
    OtherRollouts,
    StageMeter,
    StageScope,
    stored_versions,
    wait_for_stored,
)
from trainspan_loop.clients.new_rewards import Places, last_places, new_rewards, validation_rewards
from trainspan_loop.clients.store import counts
from trainspan_loop.processes.rollout_command import RolloutCommand, RolloutRequest, StageCommands
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.services import Services
from trainspan_loop.state.run_folder import RunFolder
from trainspan_rollouts.ledger.recorded import waiting_rounds
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.artifacts.run_records import CheckRecord, RolloutFigures
from trainspan_schemas.command_events import (
    NOTHING_TO_TRAIN,
    Event,
    NoDataset,
    Progress,
    RoundTrained,
    RunResult,
    TrainingProgress,
)
from trainspan_schemas.config.policy_scope import Policy, policies_of, scoped
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ProcessError, StoreError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.home import policy_dir
from trainspan_schemas.telemetry.identity import Split

__all__ = ["Collected", "NothingToTrain", "Stages"]

P = ParamSpec("P")
R = TypeVar("R")

STORED_TIMEOUT_S = 15.0
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class NothingToTrain:
    """Why a policy has no dataset of a round."""

    reason: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Those that a manifest would have."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of one `trainspan rollout`."""

    result: RunResult
    checks: list[CheckRecord]
    seconds: float
    is_stored: bool
    """Whether the collector has every rollout."""
    versions: dict[str, list[int]] = field(default_factory=dict)
    """Of rollouts of split val: name of each policy → its versions that answered."""
    sampled_tokens: int | None = None
    """By the servers; None if others used them meanwhile."""
    sampling_seconds: float | None = None
    """The command's run time."""

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Collected":
        return cls(**{**record, "result": RunResult(**record["result"])})

    def record(self) -> JsonObject:
        return asdict(self)

    def figures(self) -> RolloutFigures:
        """Those of a round's record."""
        figures = cast("RolloutFigures", asdict(self.result))
        return {**figures, "sampled_tokens": self.sampled_tokens, "sampling_seconds": self.sampling_seconds}


class Stages:
    """Runs the stages of rounds against the services of a run. Every method raises ProcessError if a command fails.

    Different stages may run at the same time, from different threads; only one may collect or stream, and one
    more may `collect_alongside`.
    """

    def __init__(self, settings: Settings, services: Services, folder: RunFolder, screen: Screen) -> None:
        self._settings = settings
        self._services = services
        self._folder = folder
        self._screen = screen
        self._commands = StageCommands(services, folder)
        self._rollouts = RolloutCommand(settings, services, folder, self._commands)
        self._stopped = threading.Event()
        self.policies = policies_of(settings)
        self.take_turns = settings.loop.policies_in_turn or settings.serving.sleep
        """Whether a policy's dataset is built only after the one before it is trained."""
        self._others = OtherRollouts()

    def stop(self) -> None:
        """Ends the commands in progress, and lets none start until `resume`."""
        self._stopped.set()
        self._commands.stop()

    def resume(self) -> None:
        self._stopped.clear()
        self._commands.resume()

    def collect(self, tasks: Path, round_: int, split: Split, n: int) -> Collected:
        """Runs the agent `n` times on each task of a file and collects the counts from all sources.

        Training rollouts of an interrupted loop are resumed: those that ended are not made again.
        """
        if self._settings.loop.target is None:  # others use the server meanwhile
            return self.collect_alongside(self._folder.run_id, tasks, round_, n)
        self._wake()
        return self._collect(self._request(str(tasks), round_, split, n), self._screen.progress)

    def stream(
        self, round_: int, n: int, on_progress: Callable[[Progress], None], write: Callable[[IO[str]], None]
    ) -> Collected:
        """Runs the agent `n` times on each training task that `write` writes to the runner, until it closes the pipe."""
        return self._collect(self._request("-", round_, "train", n), on_progress, write)

    def collect_alongside(self, run_id: str, tasks: Path, round_: int, n: int) -> Collected:
        """Runs the agent `n` times on each validation task of a file while other rollouts, or users, may go on."""
        self._wake()
        with self._others.quiet:
            began, began_ns = time.monotonic(), time.time_ns()
            result = self._rollouts.run(RolloutRequest(run_id, str(tasks), round_, "val", n), lambda _: None)
            total, calls = result.total, result.calls
            began_ns -= self._services.policy.counts().behind_ns
            scope = StageScope(run_id, "val", round_)
            stored = self._read(wait_for_stored, self.stores, scope, began_ns, rollouts=total, requests=calls)
            versions = self._read(stored_versions, self.stores, scope, began_ns)
            self._others.add(stored)
        checks = [check.record() for check in stored_checks(stored, total, calls, result.unreported)]
        return Collected(result, checks, time.monotonic() - began, stored.rollouts >= total, versions)

    def _wake(self) -> None:
        if self._settings.serving.sleep:  # no swap woke it if the trainer skipped the round
            self._services.policy.wake()

    def _collect(
        self,
        request: RolloutRequest,
        on_progress: Callable[[Progress], None],
        write: Callable[[IO[str]], None] | None = None,
    ) -> Collected:
        began, services = time.monotonic(), self._services
        round_ = None if write else request.round  # a stream's tasks name their rounds
        scope = StageScope(request.run_id, request.split, round_)
        with self._others.quiet:
            meter = StageMeter(services.policy, services.stores, scope, self._others)
        result = self._rollouts.run(request, on_progress, write)
        sampling_s = time.monotonic() - began
        with self._others.quiet:
            fresh = result.total - result.resumed
            counted = self._read(meter.stop, fresh, result.calls, unreported=result.unreported)
            versions = self._read(meter.versions) if request.split == "val" else {}
        checks = [check.record() for check in stage_checks(counted, self._settings.rollouts.concurrency)]
        are_stored, seconds = counted.stored_rollouts >= counted.rollouts, time.monotonic() - began
        return Collected(result, checks, seconds, are_stored, versions, counted.sampled_tokens, sampling_s)

    def send_waiting(self) -> None:
        """Sends the verdicts of streamed rollouts that no collector had acknowledged when the loop was interrupted."""
        for round_ in waiting_rounds(self._folder.run_id, "train"):
            self._rollouts.send_waiting(self._request("-", round_, "train", self._settings.rollouts.n))

    def _request(self, tasks: str, round_: int, split: Split, n: int) -> RolloutRequest:
        return RolloutRequest(self._folder.run_id, tasks, round_, split, n)

    def dataset(
        self, round_: int, *, are_stored: bool, policies: Sequence[Policy] | None = None
    ) -> Mapping[Policy, NothingToTrain]:
        """Builds the datasets of a round's rollouts, which the trainers pick up at once; only those of `policies`, if given.

        The runner has ended: if all of its rollouts `are_stored`, incomplete groups do not wait.
        """
        arguments = ["--round", str(round_), "--wait-s", "30", "--settle-s", "20"]
        return self._datasets(round_, [*arguments, "--group-wait-s", "0"] if are_stored else arguments, policies)

    def batch(self, round_: int, since: int, group_wait_s: float) -> Mapping[Policy, NothingToTrain]:
        """Builds the datasets of a round from all complete groups of draw `since` or later that no earlier one used.

        Groups with rollouts in progress are left out for `group_wait_s` after the last one of them ended.
        """
        arguments = ["--number", str(round_), "--since-round", str(since), "--group-wait-s", str(group_wait_s)]
        return self._datasets(round_, [*arguments, "--settle-s", str(max(20.0, group_wait_s))])

    def live_dataset(self, round_: int, since: Places) -> Mapping[Policy, NothingToTrain]:
        """Builds the datasets of a round from all rewarded rollouts of any run that came after these places into the stores.

        Most users give no feedback, so that most calls may be without a reward. The default baseline is that of rollouts without a
        task: one rollout that names a task must not change how all others are compared.
        """
        arguments = ["--number", str(round_), "--min-coverage", "0"]
        arguments += [word for seq in since for word in ("--since-seq", str(seq))]
        return self._datasets(round_, arguments, of_run=False)

    def has_dataset(self, round_: int) -> bool:
        """Whether a dataset of the round was built, also before the loop was interrupted."""
        return any(self._dataset_dir(round_, policy).exists() for policy in self.policies)

    @property
    def stores(self) -> tuple[str, ...]:
        return self._services.stores

    def last_places(self) -> Places:
        """The places that the stores have reached."""
        return self._read(last_places, self._services.stores)

    def new_rewards(self, since: Places) -> tuple[int, Places]:
        """The number of rewards that were stored after these places, and the places up to which they were counted."""
        return new_rewards(self._services.stores, self._settings, since)

    def validation_rewards(self, since: Places) -> int:
        """How many of these rewards are of validation rollouts."""
        return validation_rewards(self._services.stores, self._settings, since)

    def _datasets(
        self, round_: int, arguments: list[str], policies: Sequence[Policy] | None = None, *, of_run: bool = True
    ) -> Mapping[Policy, NothingToTrain]:
        """Builds the datasets of the policies that have none yet: by default all, or the first if they take turns."""
        nothing: dict[Policy, NothingToTrain] = {}
        for policy in policies or (self.policies[:1] if self.take_turns else self.policies):
            if self._dataset_dir(round_, policy).exists():
                continue
            if self._settings.serving.sleep:
                self._services.policy.sleep()
            fixed = [word for store in self._services.stores for word in ("--store", store)]
            fixed += ["--out", str(self._folder.datasets)]
            fixed += ["--run", self._folder.run_id] if of_run else ["--baseline", self._live_baseline(policy)]
            fixed += [] if policy is None else ["--policy", policy]
            if (why := self._read(self._build, fixed + arguments)) is not None:
                nothing[policy] = why
        return nothing

    def _live_baseline(self, policy: Policy) -> str:
        from trainspan_processing.credit.plan import make_plan  # loads Polars

        return make_plan(scoped(self._settings, policy).dataset, has_tasks=False).estimator.baseline

    def _build(self, arguments: list[str]) -> NothingToTrain | None:
        """Builds a dataset; returns why there is none, if nothing can be trained. Raises StoreError if a store was away."""
        events: list[Event] = []
        code, message = self._commands.run("dataset", arguments, [], events.append, admitted=(0, 1, NOTHING_TO_TRAIN))
        answer = next((event for event in events if isinstance(event, NoDataset)), NoDataset())
        if code == 1:
            failure = f"dataset failed: {message} (log: {self._folder.logs / 'dataset.log'})"
            raise (ProcessError if answer.store_error is None else StoreError)(failure)
        return NothingToTrain(answer.nothing_to_train or message, answer.figures) if code == NOTHING_TO_TRAIN else None

    def _read(self, read: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What `read` gets from the stores; it is repeated for `ready_timeout_s`, because a collector may be restarting."""
        deadline, is_noted = time.monotonic() + self._settings.loop.ready_timeout_s, False
        while True:
            try:
                return read(*args, **kwargs)
            except StoreError as error:
                if time.monotonic() > deadline or self._stopped.wait(_RETRY_S):
                    raise
                if not is_noted:
                    self._screen.note(f"a store does not answer, and is asked again: {error}")
                is_noted = True

    def _dataset_dir(self, round_: int, policy: Policy) -> Path:
        return dataset_dir(policy_dir(self._folder.datasets, policy), round_)

    def sampled_tokens(self) -> int:
        """Tokens that the policy servers sampled since their start, without those that ran at the same time as a stage."""
        return self._services.policy.counts().total.sampled_tokens - self._others.tokens

    def keep_alive(self) -> None:
        """Restarts services that exited. Raises ProcessError after too many restarts."""
        self._services.keep_alive()

    def wait_until_stored(self, rollouts: int, began_ns: int, missing: int) -> int:
        """Waits up to 15 s until so many training rollouts that began since `began_ns` are stored with their verdicts.

        Returns how many are not; those that were `missing` the last time are not waited for again.
        """
        query = f"""
            SELECT count(DISTINCT rollout_id) AS rollouts FROM rollouts
            WHERE run_id = '{self._folder.run_id}' AND start_ns >= {began_ns} AND status IS NOT NULL"""
        deadline = time.monotonic() + STORED_TIMEOUT_S
        with contextlib.suppress(StoreError):  # the collector restarts: later batches take what this one lacks
            while True:
                left = rollouts - counts(self._services.stores, query)["rollouts"]
                if left <= missing or time.monotonic() > deadline:
                    return max(0, left)
                time.sleep(0.1)
        return missing

    def trained(self, round_: int, policy: Policy) -> RoundTrained:
        """Waits for the event of the policy's trainer for the round's dataset, which the trainer finds by itself.

        If the trainer used it before the loop (or the trainer) was killed, there is no event: the result then comes from
        its metrics or its ledger, or, if the figures are lost, from the trainer that started since. Raises ProcessError if
        the trainer failed and did not use up the dataset, because its disk is full: once that is mended, a resumed run trains it.
        """
        manifest = manifest_path(self._dataset_dir(round_, policy))
        sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest()
        while True:
            earlier = self._folder.trained_before(sha256, policy)
            try:
                event = self._services.trainer(policy).events.get(timeout=0.5)
            except queue.Empty:
                if earlier is not None:
                    return self._recovered(round_, earlier, policy)
                self._services.keep_alive()
                continue
            if isinstance(event, TrainingProgress) and event.round == round_:
                self._screen.training(event, policy)
                self._folder.note_training(event)
            if isinstance(event, RoundTrained) and event.round == round_:
                if event.recovered:
                    made: JsonObject = {"version": event.version, "checkpoint": event.checkpoint}
                    return self._recovered(round_, earlier or made, policy)
                self._screen.policy(event.version, policy)
                if event.error and self._folder.used(sha256, policy) is None:
                    raise ProcessError(f"round {round_} is not trained: {event.error}; mend that, then use --resume")
                return event

    def version(self, policy: Policy) -> int:
        """The version of the policy in service."""
        return self._services.policy.state().of(policy).version

    def _recovered(self, round_: int, known: JsonObject, policy: Policy) -> RoundTrained:
        """Reconstructs an event from the trainer's files and the policy server's last swap."""
        now = self._services.policy.state().of(policy)
        self._screen.policy(now.version, policy)
        return RoundTrained.of_metrics(
            {"version": None, **known},
            round=round_,
            swap={"version": now.version, "canary": now.canary},
            withdrawn=self._folder.is_withdrawn(known.get("checkpoint"), policy),
            recovered=True,
        )

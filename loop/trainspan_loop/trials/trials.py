"""The trial of each new version, right after its swap, while other rollouts or users go on.

Everything is decided from files, so that a loop that was killed at any point comes to the same end: outcomes are kept once
their rollouts have ended, then the verdict is kept, then a refused version is taken out of service. Until all of that is
done, the trainer gets no other dataset.
"""

import hashlib
import time
from dataclasses import dataclass
from typing import Final

from trainspan_loop.checks.integrity import Check, version_check
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.services import Services
from trainspan_loop.processes.stages import Stages
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import TaskPool
from trainspan_loop.trials.comparison import smallest_p
from trainspan_loop.trials.evidence import TRIALS, EvidenceFiles, read_outcomes
from trainspan_loop.trials.lineage import ancestors, is_in_service, is_withdrawn, version_trained_on
from trainspan_loop.trials.verdict import Verdict, judge, verdict_checks
from trainspan_rollouts.judges.choice import compares_rollouts
from trainspan_rollouts.ledger.paths import ledger_file
from trainspan_rollouts.records import Shard
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, checkpoint_name
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import CheckpointError, ConfigError
from trainspan_training.checkpoints.rollback import roll_back
from trainspan_training.checkpoints.swap_request import PolicyAddress

__all__ = ["Trial", "Trials", "check_trials", "put_back"]

_TRIES: Final = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial that has ended."""

    verdict: Verdict
    seconds: float
    failure: str | None = None
    """Why a refused version is still in service."""

    @property
    def refused(self) -> str | None:
        """Why the version was refused, if it was."""
        return self.verdict.reason

    @property
    def in_service(self) -> int:
        """The version in service after it."""
        verdict = self.verdict
        is_back = verdict.is_worse and self.failure is None and verdict.before is not None
        return verdict.before if is_back and verdict.before is not None else verdict.version


def check_trials(settings: Settings, pool: TaskPool | None) -> None:
    """Raises ConfigError if trials are asked for that cannot be held, or that could refuse no version whatever its outcomes."""
    loop = settings.loop
    if not loop.trial_tasks:
        return
    if settings.policies:
        raise ConfigError("[loop] trial_tasks is for one policy for all agents: remove it or [policies]")
    if pool is None:
        raise ConfigError("[loop] trial_tasks needs an agent that the loop can run: set val_target (or target)")
    if not 0 < loop.trial_level < 1 or loop.trial_n < 1:
        raise ConfigError(
            f"[loop] trial_level = {loop.trial_level:g} must be between 0 and 1, trial_n = {loop.trial_n} at least 1"
        )
    if settings.rollouts.judge and compares_rollouts(settings.rollouts.judge):
        raise ConfigError(
            f"[loop] trial_tasks compares versions by their rewards, but the judge {settings.rollouts.judge} compares rollouts of one "
            "version with each other: remove it or use a judge that scores each rollout alone"
        )
    least = smallest_p(len(pool), loop.trial_n)
    if least > loop.trial_level / 2:
        raise ConfigError(
            f"{loop.trial_tasks} has {len(pool)} tasks of split val: if all of them fail, p is {least:.2g}, above half of "
            f"[loop] trial_level = {loop.trial_level:g}: add tasks or raise trial_n"
        )


class Trials:
    """Does nothing without `[loop] trial_tasks`, whose tasks are in `pool`."""

    def __init__(
        self,
        settings: Settings,
        pool: TaskPool | None,
        services: Services,
        stages: Stages,
        folder: RunFolder,
        screen: Screen,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._services = services
        self._stages = stages
        self._folder = folder
        self._screen = screen
        self._evidence = EvidenceFiles(folder)

    def begin_trials(self) -> None:
        """Rolls out the tasks under the version in service, with which the next one is compared, unless that was done before."""
        if self._pool is None:
            return
        version = self._stages.version(None)
        if self._evidence.of_version(version) is None:
            self._roll_out(0, version)

    def judge(self, round_: int) -> Trial | None:
        """Tries the version that the round made, and puts the one before back if it is worse; None if the round made none."""
        manifest = manifest_path(dataset_dir(self._folder.datasets, round_))
        if self._pool is None or not manifest.exists():
            return None
        trained = version_trained_on(self._folder.checkpoints, hashlib.sha256(manifest.read_bytes()).hexdigest())
        if trained is None:
            return None
        began = time.monotonic()
        verdict = self._verdict(round_, trained)
        failure = self._put_back(round_, verdict) if verdict.is_worse else None
        self._screen.stage("")
        return Trial(verdict, time.monotonic() - began, failure)

    def checks(self, trial: Trial | None) -> list[Check]:
        """Checks of the round that follows those on record."""
        return [] if trial is None else verdict_checks(self._folder.records(), trial.verdict, trial.failure)

    def _verdict(self, round_: int, trained: CheckpointMeta) -> Verdict:
        """The verdict, kept in a file of its own before anything is done because of it."""
        name = f"{TRIALS}/round-{round_:04d}.json"
        if known := self._folder.read(name):
            return Verdict.of_record(known)
        verdict = self._new_verdict(round_, trained)
        (self._folder.path / TRIALS).mkdir(exist_ok=True)
        self._folder.write(name, verdict.record())
        return verdict

    def _new_verdict(self, round_: int, trained: CheckpointMeta) -> Verdict:
        level, version = self._settings.loop.trial_level, trained.version
        evidence = ((meta.version, self._evidence.of_version(meta.version)) for meta in self._ancestors(trained))
        before, earlier = next(((number, known) for number, known in evidence if known is not None), (None, None))
        if (why := self._why_not(trained)) is None:
            mixed = None if self._evidence.has(round_, version) else self._roll_out(round_, version)
            why = mixed or self._why_not(trained)
        later = self._evidence.of_version(version)
        if before is None or earlier is None:
            why = why or f"no version before version {version} has rolled out the trial tasks"
        if why is not None or before is None or earlier is None or later is None:
            return Verdict(version, before, level, unjudged=why or "its trial tasks were not rolled out")
        return judge(version, before, level, earlier, later)

    def _ancestors(self, trained: CheckpointMeta) -> list[CheckpointMeta]:
        return list(ancestors(self._folder.checkpoints, trained))

    def _why_not(self, trained: CheckpointMeta) -> str | None:
        """Why rollouts of now say nothing about the version."""
        if is_withdrawn(self._folder.checkpoints, checkpoint_name(trained.version)):
            return f"version {trained.version} was taken out of service by hand"
        served = self._stages.version(None)
        return None if served == trained.version else f"the policy server has version {served}, not {trained.version}"

    def _roll_out(self, round_: int, version: int) -> str | None:
        """Returns why the outcomes are not those of the version; they are kept otherwise."""
        assert self._pool is not None, "asked for"
        loop = self._settings.loop
        self._screen.stage(f"trial of version {version}")
        tasks = self._folder.draw_tasks("trial", self._pool, len(self._pool), "trial")
        run_id = f"{self._folder.run_id}-trial"
        self._services.level_servers()
        collected = self._stages.collect_alongside(run_id, tasks, round_, loop.trial_n)
        self._screen.stage("")
        if not (check := version_check(collected.versions, {None: version})).ok:
            return f"other versions answered its trial tasks: {check.detail}"
        self._evidence.keep(round_, version, read_outcomes(ledger_file(run_id, round_, "val", Shard(0, 1))))
        return None

    def _put_back(self, round_: int, verdict: Verdict) -> str | None:
        """Puts the version before in service, and rolls out the tasks under it once more; returns why it could not.

        Without that, a version whose first rollouts were lucky would be the measure of all later ones.
        """
        before = verdict.before
        assert before is not None, "it was compared with it"
        if is_in_service(self._folder.checkpoints, checkpoint_name(verdict.version)):
            self._screen.stage(f"version {before} goes back in service")
            if (failure := put_back(before, self._services, self._settings, self._folder)) is not None:
                return failure
        self._screen.policy(before)
        if not self._evidence.has(round_, before) and self._stages.version(None) == before:
            self._roll_out(round_, before)
        return None


def put_back(version: int, services: Services, settings: Settings, folder: RunFolder) -> str | None:
    """Puts a version back in service, at every server that answers; returns why it could not."""
    address = PolicyAddress(services.policy.url, checkpoints_url=settings.train.checkpoints_url)
    failure = ""
    patience_s = settings.train.publish_timeout_s  # a server may drain and hash for minutes
    for _ in range(_TRIES):
        services.keep_alive()
        try:
            roll_back(folder.checkpoints, version, address, retry_for_s=patience_s)
        except CheckpointError as error:
            failure = str(error)
        else:
            return "; ".join(services.level_servers()) or None
    return failure

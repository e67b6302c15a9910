"""One trainer run: finds the model and dataset, starts TRL, and trains one round or follows new datasets."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_schemas.command_events import TrainingProgress
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import UsageError
from trainspan_schemas.home import served_model
from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.checkpoints.published import announce
from trainspan_training.checkpoints.swap_request import PolicyAddress, Swap
from trainspan_training.data.dataset import DatasetFolder
from trainspan_training.data.loss_weights import Rule, find_rule
from trainspan_training.dataset_queue import Upstream, fetched, follow, newest
from trainspan_training.devices.cores import prepare_process, share_cores
from trainspan_training.devices.device import device_name, hide_gpus
from trainspan_training.devices.leader import Leader
from trainspan_training.devices.team import Team
from trainspan_training.metrics.round_record import has_record
from trainspan_training.metrics.trackers import places
from trainspan_training.model.starting_policy import Policy, starting_policy
from trainspan_training.objective.heavy_imports import import_training
from trainspan_training.objective.options import check, reporters
from trainspan_training.rounds.missing_state import MissingState, dataset_of, find_missing_state
from trainspan_training.rounds.publication import publish_pending, skip
from trainspan_training.rounds.result import NO_ROWS, RoundResult

__all__ = ["TrainJob", "train"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainJob:
    """Parameters of a trainer run."""

    settings: TrainSettings
    datasets: Path
    """A folder of datasets; without `follow`, may also be a single dataset."""
    checkpoints: Path
    follow: bool = False
    """Keep running and train each new dataset."""
    rounds: int | None = None
    """Number of datasets after which `follow` ends; None means never."""
    policy: str | None = None
    """Which of several policies on the server it trains."""
    upstream: Upstream | None = None
    """The store whose manifests are in `datasets`; rows are fetched from it."""

    @property
    def address(self) -> PolicyAddress:
        return PolicyAddress(self.settings.policy_url, self.policy, self.settings.checkpoints_url)


class _Stopped(BaseException):
    """Raised on SIGTERM. Only the work in progress is lost: see `checkpoints`."""


def train(
    job: TrainJob,
    on_ready: Callable[[str, str], None],
    on_result: Callable[[RoundResult], None],
    on_progress: Callable[[TrainingProgress], None] = lambda _: None,
) -> None:
    """Runs the job, calls `on_ready` with device and dtype, `on_progress` as a round goes on, and `on_result` for each dataset.

    SIGTERM ends it early, without an error. In a team, only the leader calls them, and all processes end with the same error. Raises
    ConfigError, CheckpointError or DatasetError if the job cannot be done; in a single process, before any heavy
    import.
    """
    prepare_process()
    check(job.settings)
    hide_gpus(job.settings.device)
    rule = find_rule(job.settings)
    if job.rounds is not None and not (job.follow and job.rounds > 0):
        raise UsageError(f"--rounds {job.rounds} needs --follow and must be at least 1")
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        team = Team.join()
        try:
            with _held(job.checkpoints, team) as checkpoints:
                _Session(job, team, checkpoints, rule, on_ready, on_progress, on_result).run()
            team.finish()
        except Exception as error:
            if (first := team.fail(error)) is error:
                raise
            raise first from error
        finally:
            team.leave()
    except _Stopped:
        log.info("stopped by SIGTERM")
    finally:
        signal.signal(signal.SIGTERM, previous)


def _stop(*_: object) -> None:
    raise _Stopped


@contextmanager
def _held(root: Path, team: Team) -> Iterator[Checkpoints | None]:
    """The leader's exclusive handle to the checkpoints folder; None in the other processes."""
    opened: list[Checkpoints] = []
    team.share(lambda: opened.append(Checkpoints(root)))
    try:
        yield opened[0] if opened else None
    finally:
        for checkpoints in opened:
            checkpoints.close()


class _Session:
    """The job as run by this process."""

    def __init__(
        self,
        job: TrainJob,
        team: Team,
        checkpoints: Checkpoints | None,
        rule: Rule,
        on_ready: Callable[[str, str], None],
        on_progress: Callable[[TrainingProgress], None],
        on_result: Callable[[RoundResult], None],
    ) -> None:
        self._job = job
        self._team = team
        self._leader = Leader(team, checkpoints)
        self._rule = rule
        self._on_ready = on_ready
        self._on_progress = on_progress if team.leads else lambda _: None
        self._on_result = on_result

    def run(self) -> None:
        settings = self._job.settings
        policy = self._leader.share(lambda checkpoints: _start(checkpoints, self._job))
        missing_state = self._leader.share(lambda checkpoints: _missing_state(checkpoints, policy, self._job))
        datasets = self._datasets(policy)
        if datasets is None:
            return
        import_training()
        device = device_name(settings.device)
        from trainspan_training.rounds.setup import set_up

        share_cores(self._team.size)
        with places(reporters(settings), self._job.checkpoints):
            rounds = set_up(
                datasets,
                self._leader,
                policy,
                settings,
                self._rule,
                self._on_progress,
                self._report,
                self._team,
                address=self._job.address,
                keep_going=self._job.follow,
                missing_state=missing_state,
            )
            if self._team.leads:
                self._on_ready(device, rounds.trainer.dtype)
            rounds.run()

    def _datasets(self, policy: Policy) -> Iterator[DatasetFolder] | None:
        """Datasets to train; None if there is nothing to train."""
        job = self._job
        if job.follow:
            return self._team.each(lambda: islice(self._appearing(policy), job.rounds))
        dataset: DatasetFolder = self._leader.share(
            lambda checkpoints: newest(job.datasets, checkpoints.ledger, job.upstream)
        )
        if dataset.rows:
            return iter([dataset])
        skip(self._leader, dataset, NO_ROWS)
        self._report(
            RoundResult(dataset.round, policy.version, policy.checkpoint, None, Swap("off", None), skipped=NO_ROWS)
        )
        return None

    def _appearing(self, policy: Policy) -> Iterator[DatasetFolder]:
        checkpoints = self._leader.resource
        assert checkpoints is not None, "the leader holds the checkpoints folder"
        # The first dataset is asked for after the newest policy's round was repeated, if it had to be.
        if policy.checkpoint and not has_record(checkpoints.root, policy.checkpoint):
            dataset = dataset_of(CheckpointMeta.read(policy.folder), self._job.datasets)
            if dataset is not None:
                made = (dataset.round, policy.version, policy.checkpoint)
                self._report(RoundResult(*made, None, Swap("off", None), recovered=True))
        yield from follow(self._job.datasets, checkpoints.ledger, upstream=self._job.upstream)

    def _report(self, result: RoundResult) -> None:
        if self._team.leads:
            self._on_result(result)


def _start(checkpoints: Checkpoints, job: TrainJob) -> Policy:
    settings = job.settings
    announce(checkpoints.root, job.address)
    publish_pending(job.address, checkpoints, settings.publish_timeout_s)
    policy = starting_policy(checkpoints, settings.model or served_model(), settings.adapter)
    return replace(policy, trained_on=policy.trained_on or job.policy)


def _missing_state(checkpoints: Checkpoints, policy: Policy, job: TrainJob) -> MissingState | None:
    missing = find_missing_state(checkpoints, policy, job.datasets)
    return missing and replace(missing, dataset=fetched(missing.dataset, job.upstream))

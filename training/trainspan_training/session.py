"""One use of the trainer: finds model and dataset, starts TRL, trains one round or each that appears."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trainspan_schemas.checkpoint import CheckpointMeta
from trainspan_schemas.errors import UsageError
from trainspan_schemas.home import served_model
from trainspan_schemas.settings import TrainSettings

from .checkpoints import Checkpoints
from .ledger import Entry
from .model import import_training, load_model, load_tokenizer
from .options import check
from .policy import starting_policy
from .publish import EVENTS, Swap, publish
from .result import NO_ROWS, Result
from .source import follow, newest
from .transitions import DatasetFolder

__all__ = ["Job", "train"]

log = logging.getLogger(__name__)

_DRAW_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """What to do."""

    settings: TrainSettings
    datasets: Path
    """A folder of datasets; without `follow` also one dataset."""
    checkpoints: Path
    follow: bool = False
    """Keep training each dataset that appears."""
    rounds: int | None = None
    """Datasets after which `follow` ends; None: never."""


class _Stopped(BaseException):
    """SIGTERM. What was under way is lost, and nothing else: see `checkpoints`."""


def train(job: Job, on_ready: Callable[[], None], on_result: Callable[[Result], None]) -> None:
    """Runs the job; `on_result` hears of each dataset. SIGTERM ends it early, without an error.

    Raises ConfigError, CheckpointError or DatasetError where it cannot be done, before anything heavy is imported.
    """
    check(job.settings)
    if job.rounds is not None and not (job.follow and job.rounds > 0):
        raise UsageError(f"--rounds {job.rounds} goes with --follow and must be at least 1")
    checkpoints = Checkpoints(job.checkpoints)
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        _run(job, checkpoints, on_ready, on_result)
    except _Stopped:
        log.info("stopped by SIGTERM")
    finally:
        signal.signal(signal.SIGTERM, previous)
        checkpoints.close()


def _stop(*_: object) -> None:
    raise _Stopped


def _run(job: Job, checkpoints: Checkpoints, on_ready: Callable[[], None], on_result: Callable[[Result], None]) -> None:
    _publish_pending(job.settings.policy_url, checkpoints)
    policy = starting_policy(checkpoints, job.settings.model or served_model())
    picture = _Picture(job.checkpoints)
    datasets: Iterator[DatasetFolder]
    if job.follow:
        datasets = islice(follow(job.datasets, checkpoints.ledger, picture.draw_if_due), job.rounds)
    else:
        dataset = newest(job.datasets, checkpoints.ledger)
        if dataset.rows == 0:
            checkpoints.ledger.append(Entry("skipped", dataset.sha256, reason=NO_ROWS))
            on_result(
                Result(dataset.round, policy.version, policy.checkpoint, None, Swap("off", None), skipped=NO_ROWS)
            )
            return
        datasets = iter([dataset])

    import_training()
    from .rounds import Rounds
    from .trainer import TransitionGRPOTrainer

    _share_cores()

    def hear(result: Result) -> None:
        picture.stale = picture.stale or result.record is not None
        on_result(result)

    rounds = Rounds(datasets, checkpoints, policy, job.settings, hear, keep_going=job.follow)
    model, tokenizer = load_model(policy.folder), load_tokenizer(policy.folder)
    rounds.trainer = TransitionGRPOTrainer(model, tokenizer, job.settings, rounds, str(job.checkpoints))
    on_ready()
    try:
        rounds.trainer.train()
    finally:
        picture.draw()


def _publish_pending(url: str, checkpoints: Checkpoints) -> None:
    """Swaps in `latest` where an earlier trainer was stopped before it could."""
    folder = checkpoints.pending()
    if folder is None:
        return
    meta = CheckpointMeta.read(folder)
    swap = publish(url, folder.name, meta.version)
    log.warning("checkpoint=%s was not published when the trainer stopped: now %s", folder.name, swap.outcome)
    if swap.outcome == "refused":
        checkpoints.refuse(folder, str(swap.error))
    else:
        checkpoints.ledger.append(Entry(EVENTS[swap.outcome], meta.dataset_sha256, folder.name, swap.error))


def _share_cores() -> None:
    """Half of the cores, unless OMP_NUM_THREADS says otherwise.

    Threads that wait for one that another process displaced spin: on two busy cores two threads were six times slower than one.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))


class _Picture:
    """Draws the curves when a round has changed them: while waiting, seldom, and at the end."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._drawn_at = time.monotonic()
        self.stale = False

    def draw_if_due(self) -> None:
        if time.monotonic() - self._drawn_at > _DRAW_EVERY_S:
            self.draw()

    def draw(self) -> None:
        if self.stale:
            from .curves import draw

            draw(self._checkpoints)
            self.stale = False
            self._drawn_at = time.monotonic()

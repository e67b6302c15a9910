"""The rounds: read a dataset, hand its steps to the trainer, check, save, publish.

The trainer iterates `Rounds`: between two steps, and before and after a round, its generator does the rest. Model and
Adam's state stay in memory from round to round. In a team every process iterates in step; only the leader writes and
publishes.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from safetensors import SafetensorError

from trainspan_schemas.artifacts.checkpoint import Canary
from trainspan_schemas.command_events import TrainingProgress
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import DatasetError, TrainingError
from trainspan_training.checkpoints.folder import RolledBackError
from trainspan_training.checkpoints.lineage import Lineage
from trainspan_training.checkpoints.swap_request import PolicyAddress, Swap, served_dtype
from trainspan_training.data.dataset import DatasetFolder
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.loss_weights import Rule
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.data.sequences import ChatTurns
from trainspan_training.devices.leader import Leader
from trainspan_training.metrics.alarms import raised
from trainspan_training.metrics.movement import Movement
from trainspan_training.metrics.round_record import RoundRecord, has_record, signals
from trainspan_training.metrics.signal import Signal, signal_gate
from trainspan_training.metrics.stage_clock import StageClock
from trainspan_training.model.full_weights import FullWeights, load_slices
from trainspan_training.model.lora import AdapterWeights
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer
from trainspan_training.objective.token_stats import kl_fault
from trainspan_training.rounds.canary import CanaryKeeper
from trainspan_training.rounds.missing_state import MissingState
from trainspan_training.rounds.old_policy import Prepared
from trainspan_training.rounds.publication import Publication, skip
from trainspan_training.rounds.reading import Outline
from trainspan_training.rounds.records import Trained
from trainspan_training.rounds.result import RoundResult
from trainspan_training.rounds.round_steps import RoundSteps
from trainspan_training.rounds.saving import PolicyFiles

__all__ = ["Rounds"]

log = logging.getLogger(__name__)


class Rounds:
    """An iterable of optimizer steps; set `trainer` (and `reference`) first.

    Calls `on_progress` after each of them and when another stage of a round begins, and `on_result` for each dataset.

    With `keep_going` an unusable dataset is skipped; otherwise iterating raises DatasetError or TrainingError. With
    `missing_state`, `policy` is the parent of the newest policy, whose state is rebuilt first. An `unloaded` model gets its weights
    when it is split.
    """

    def __init__(
        self,
        datasets: Iterable[DatasetFolder],
        leader: Leader,
        policy: Policy,
        settings: TrainSettings,
        on_progress: Callable[[TrainingProgress], None],
        on_result: Callable[[RoundResult], None],
        *,
        address: PolicyAddress,
        layout: BatchLayout,
        rule: Rule,
        weights: FullWeights | AdapterWeights,
        keep_going: bool,
        missing_state: MissingState | None = None,
        unloaded: bool = False,
        turns: ChatTurns | None = None,
    ) -> None:
        self._datasets = datasets
        self._leader = leader
        self._started_from = policy
        self._settings = settings
        self._on_progress = on_progress
        self._on_result = on_result
        self._address = address
        self._layout = layout
        self._rule = rule
        self._weights = weights
        self.reference: Any = None
        """The model that the run started from, if `kl_coef` needs it and it is not the policy without its adapter."""
        self._keep_going = keep_going
        self._missing_state = missing_state
        self._unloaded = unloaded
        self._turns = turns
        self._server_dtype: str | None = None
        self._clock = StageClock(on_progress)
        self.trainer: TransitionGRPOTrainer
        self._files: PolicyFiles
        self._publication: Publication
        self._canary: CanaryKeeper
        self._movement: Movement
        self._steps: RoundSteps

    @property
    def _policy(self) -> Policy:
        """The newest good policy."""
        return self._publication.policy

    def run(self) -> None:
        """Trains until there are no more datasets."""
        trainer = self.trainer
        try:
            trainer.train()
        except BaseException:
            # Lets reporters end their runs.
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            raise
        finally:
            self.close()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        self._set_up()
        if self._missing_state:
            yield from self._repeat_round(self._missing_state)
        waiting_since = time.perf_counter()
        for dataset in self._datasets:
            self._clock.restart(dataset.round, wait=time.perf_counter() - waiting_since)
            self._on_result((yield from self._round(dataset)))
            waiting_since = time.perf_counter()
        self.trainer.control.should_training_stop = True

    def _set_up(self) -> None:
        trainer, settings = self.trainer, self._settings
        self._steps = RoundSteps(
            trainer,
            settings,
            self._rule,
            self._clock,
            self._on_progress,
            reference=self.reference,
            turns=self._turns,
        )
        self._canary = CanaryKeeper(trainer.team)
        self._files = PolicyFiles(self._leader, self._weights, trainer, settings.keep_checkpoints)
        self._publication = Publication(
            self._started_from, self._files, self._leader, settings, self._address, trainer.report
        )
        self._movement = self._leader.share(lambda checkpoints: Movement.of(checkpoints.root))
        if self._unloaded:
            load_slices(trainer.policy, self._policy.model)
        self._files.load_state(self._policy)

    def close(self) -> None:
        """Waits until all writes are done, and ends the grammar process."""
        if hasattr(self, "_files"):
            self._files.finish_writing()
            self._steps.close()

    def _repeat_round(self, missing_state: MissingState) -> Iterator[list[MicroBatch]]:
        """Repeats the steps of the newest policy's round to rebuild Adam's state, lost when the trainer was killed."""
        name = missing_state.policy.name
        lineage, layout = self._lineage(), missing_state.layout(self._layout)
        log.warning("no optimizer state of %s: repeating its steps from %s", name, missing_state.parent.name)
        self._clock.restart(missing_state.dataset.round, wait=0.0)
        try:
            outline, steps = self._steps.read(missing_state.dataset, self._policy, layout, lineage)
        except (DatasetError, TrainingError) as error:
            log.warning("the optimizer state of %s cannot be recomputed, Adam starts from zero: %s", name, error)
            self._publication.policy = missing_state.policy
            self._publication.go_back()
            return
        # The canary's dtype is the coarser of server's and trainer's, by which the old policy was chosen at the time.
        self._server_dtype = Canary.read(missing_state.policy.folder).dtype
        prepared = self._steps.prepare(steps, outline.staleness, self._server_dtype)
        with self._clock.timed("optimizer"):
            earlier = self._signals(missing_state.dataset)
            done, gate = self._policy.adam_rounds, self._gate(earlier)
            yield from self._steps.make(outline, prepared, missing_state.dataset.round, done, gate)
        trained = self._trained(missing_state.dataset, outline, prepared, lineage)
        tokens = self._steps.token_file(missing_state.dataset, prepared)
        repeated = self._files.restore(missing_state.policy)
        if not repeated:
            tokens = None  # of other steps
            log.warning(
                "the repeated steps of %s did not reproduce its weights exactly (other settings, or a GPU): Adam's state is theirs",
                name,
            )
        self.trainer.failure = None
        self._publication.policy = replace(missing_state.policy, adam_rounds=missing_state.parent.adam_rounds + 1)
        if repeated and not self._leader.share(lambda checkpoints: has_record(checkpoints.root, name)):
            self._record_repeated(replace(trained, micro_batch_tokens=layout.tokens, failure=None))
        self._files.make_state(missing_state.policy, tokens)
        self.trainer.free_memory()

    def _record_repeated(self, trained: Trained) -> None:
        """Records the round of the newest policy, whose trainer was killed before it did."""
        record = replace(self._record(trained), version=self._policy.version, checkpoint=self._policy.name)
        self._movement.add(record.version, record.kl)
        self._publication.finish(record)

    def _round(self, dataset: DatasetFolder) -> Generator[list[MicroBatch], None, RoundResult]:
        self._follow_rollback()
        lineage = self._lineage()
        try:
            outline, steps = self._steps.read(dataset, self._policy, self._layout, lineage)
        except (DatasetError, TrainingError) as error:
            if not self._keep_going:
                raise
            return self._skip(dataset, str(error))
        if not steps:
            return self._skip(dataset, outline.why_nothing(self._settings))
        with self._clock.timed("canary"):
            self._ready_canary(outline)
        with self._clock.timed("old"):
            prepared = self._steps.prepare(steps, outline.staleness, self._server_dtype)
        with self._clock.timed("state"):
            self._files.finish_writing()
        with self._clock.timed("optimizer"):
            earlier = self._signals(dataset)
            done, gate = self._policy.adam_rounds, self._gate(earlier)
            yield from self._steps.make(outline, prepared, dataset.round, done, gate)
        try:
            return self._finish(self._trained(dataset, outline, prepared, lineage))
        except RolledBackError as error:  # the steps are discarded, and nothing went wrong
            self._follow_rollback()
            return self._skip(dataset, str(error))

    def _finish(self, trained: Trained) -> RoundResult:
        """Saves and publishes the result of a round's steps, unless it failed. Raises RolledBackError."""
        dataset, record = trained.dataset, self._record(trained)
        if trained.failure:
            return self._abort(dataset, record, trained.failure)
        try:
            with self._clock.timed("save"):
                scores = self._canary.score(self.trainer.policy)
                canary, tokens = self._canary.canary(scores), self._steps.token_file(dataset, trained.prepared)
                saved = self._files.save(self._policy, dataset, canary, self._layout, tokens)
        except (OSError, SafetensorError) as error:
            return self._abort(dataset, record, f"cannot save {record.checkpoint}: {error}", consume=False)
        record = replace(record, version=saved.version, checkpoint=saved.folder.name)
        self.trainer.free_memory()
        with self._clock.timed("swap"):
            swap = self._publication.offer(saved, was_there=self._server_dtype is not None)
        if self._publication.accept_or_revert(saved, swap):
            self._canary.accept(scores)
            self._movement.add(saved.version, record.kl)
        else:
            refusal = f"the policy server refused {saved.folder.name}: {swap.error}"
            record = replace(record, version=self._policy.version, checkpoint=self._policy.name, error=refusal)
        self._publication.finish(record)
        return self._result(dataset, record, swap, error=record.error)

    def _follow_rollback(self) -> None:
        if self._publication.follow_rollback(self._settings.adapter):
            self._canary.forget()

    def _ready_canary(self, outline: Outline) -> None:
        self._server_dtype = self.trainer.team.share(lambda: served_dtype(self._address.url))
        self._canary.ready(
            self.trainer.policy,
            self._policy,
            outline.prompts,
            trainer_dtype=self.trainer.dtype,
            server_dtype=self._server_dtype,
        )
        if self._settings.keep_start and self._policy.checkpoint is None:
            self._publication.keep_start(self._canary.canary(self._canary.scores))

    def _trained(self, dataset: DatasetFolder, outline: Outline, prepared: Prepared, lineage: Lineage) -> Trained:
        """The result of the steps, and whether it is accepted."""
        stats = self.trainer.take_stats()
        seconds = self._clock.seconds
        seconds["train"] = sum(step.seconds for step in stats)
        seconds["optimizer"] -= seconds["train"]
        with self._clock.timed("signal"):
            signal = self._steps.signal()
        with self._clock.timed("check"):
            made = sum(step.rate > 0 for step in stats)
            moved = self.trainer.scorer.measure(*prepared.unseen(made))
            failure = self.trainer.failure or kl_fault(moved, self._settings, fresh=self.trainer.fresh)
        return Trained(
            dataset=dataset,
            parent=self._policy,
            outline=outline,
            prepared=prepared,
            stats=stats,
            kl=moved.mean("k3_old"),
            signals=(*self._signals(dataset), signal),
            moved=self._moved(outline, lineage),
            unrecorded_tokens=self._steps.unrecorded_tokens,
            failure=failure,
            micro_batch_tokens=self._layout.tokens,
            trainer_dtype=self.trainer.dtype,
            server_dtype=self._server_dtype,
            seconds=seconds,
        )

    def _signals(self, dataset: DatasetFolder) -> list[Signal]:
        """The tests of the rounds before the dataset's."""
        earlier: list[Signal] = self._leader.share(lambda checkpoints: signals(checkpoints.root, dataset.round))
        return earlier

    def _gate(self, earlier: Sequence[Signal]) -> float:
        return signal_gate(earlier) if self._settings.signal_gate else 1.0

    def _lineage(self) -> Lineage:
        lineage: Lineage = self._leader.share(lambda checkpoints: Lineage.of(checkpoints.ledger))
        return lineage

    def _moved(self, outline: Outline, lineage: Lineage) -> float | None:
        """How far the policy is at most from the versions of the calls; None if it is unknown for one of them."""
        paths = [lineage.path(version, self._policy.version) for version in outline.versions]
        movements = [None if path is None else self._movement.along(path) for path in paths]
        known = [moved for moved in movements if moved is not None]
        return max(known) if known and len(known) == len(movements) else None

    def _record(self, trained: Trained) -> RoundRecord:
        """The record with its alarms, which the leader logs as warnings."""
        record = trained.record(self._settings)
        alarms = raised(record)
        for name, line in alarms if self.trainer.team.leads else ():
            log.warning("round=%d %s: %s", record.round, name, line)
        return replace(record, alarms=[name for name, _ in alarms])

    def _abort(self, dataset: DatasetFolder, record: RoundRecord, failure: str, *, consume: bool = True) -> RoundResult:
        log.error("round=%d aborted, policy %s stays: %s", dataset.round, self._policy.name, failure)
        record = replace(record, version=self._policy.version, checkpoint=self._policy.name, error=failure)
        self._publication.abort(dataset, record, failure, consume=consume)
        self.trainer.failure = None
        self.trainer.free_memory()
        return self._result(dataset, record, Swap("off", None), error=failure)

    def _skip(self, dataset: DatasetFolder, reason: str) -> RoundResult:
        log.warning("round=%d skipped: %s", dataset.round, reason)
        skip(self._leader, dataset, reason)
        return self._result(dataset, None, Swap("off", None), skipped=reason)

    def _result(
        self,
        dataset: DatasetFolder,
        record: RoundRecord | None,
        swap: Swap,
        *,
        skipped: str | None = None,
        error: str | None = None,
    ) -> RoundResult:
        return RoundResult(dataset.round, self._policy.version, self._policy.checkpoint, record, swap, skipped, error)

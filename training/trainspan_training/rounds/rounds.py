"""The rounds: read a dataset, hand its steps to the trainer, check, save, publish.

`Rounds` is what the trainer iterates: between two steps, and before and after a round, its generator does the rest.
Model and Adam's state stay in memory from round to round. In a team every process iterates alike; the leader alone
writes and publishes.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from safetensors import SafetensorError

from trainspan_schemas.checkpoint import Canary, checkpoint_name
from trainspan_schemas.errors import CheckpointError, DatasetError, TrainingError
from trainspan_schemas.settings import TrainSettings
from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.checkpoints.ledger import Entry
from trainspan_training.checkpoints.swap_request import EVENTS, Swap, publish, served_dtype
from trainspan_training.constraints.replay import Replayer, serialized_tokenizer
from trainspan_training.data.dataset import DatasetFolder
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.loss_weights import Rule
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.data.steps import Step
from trainspan_training.metrics import round_record
from trainspan_training.metrics.alarms import raised
from trainspan_training.metrics.trackers import figures
from trainspan_training.model.full_weights import FullWeights, load_slices
from trainspan_training.model.lora import AdapterWeights
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer
from trainspan_training.objective.token_stats import StepStats, TokenSums
from trainspan_training.rounds.canary import Prompt, make_canary, score_prompts
from trainspan_training.rounds.old_policy import (
    CHECK_TOKENS,
    Prepared,
    Staleness,
    against_old,
    agreement_of,
    largest,
    with_reference,
)
from trainspan_training.rounds.owed_state import Owed
from trainspan_training.rounds.reading import Outline, Reading
from trainspan_training.rounds.result import NO_ROWS, Result
from trainspan_training.rounds.saving import PolicyFiles

__all__ = ["Rounds"]

log = logging.getLogger(__name__)


class Rounds:
    """An iterable of optimizer steps; set `trainer` (and `reference`) before it is iterated. `on_result` hears of each dataset.

    `checkpoints` is None in processes that do not lead. With `keep_going` a dataset that cannot be used is skipped; else
    iterating raises DatasetError. With `owed`, `policy` is the parent of the newest one, whose state is made first.
    A `hollow` model gets its weights when it is split.
    """

    def __init__(
        self,
        datasets: Iterable[DatasetFolder],
        checkpoints: Checkpoints | None,
        policy: Policy,
        settings: TrainSettings,
        on_result: Callable[[Result], None],
        *,
        layout: BatchLayout,
        rule: Rule,
        weights: FullWeights | AdapterWeights,
        keep_going: bool,
        owed: Owed | None = None,
        hollow: bool = False,
    ) -> None:
        self._datasets = datasets
        self._book = checkpoints
        self._policy = policy
        self._settings = settings
        self._on_result = on_result
        self._layout = layout
        self._rule = rule
        self._weights = weights
        self.reference: Any = None
        """The model that the run started from, where `kl_coef` asks for it and it is not the policy without an adapter."""
        self._keep_going = keep_going
        self._owed = owed
        self._hollow = hollow
        self._prompts: list[Prompt] = []
        self._scores: list[list[float]] = []
        self._server_dtype: str | None = None
        self._canary_dtype = ""
        self._seconds: dict[str, float] = {}
        self.trainer: TransitionGRPOTrainer
        self._files: PolicyFiles
        self._replayer: Replayer

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        size, tokenizer = int(self._config().vocab_size), self.trainer.processing_class
        self._replayer = Replayer(size, lambda: serialized_tokenizer(tokenizer, size))
        self._files = PolicyFiles(self._book, self._weights, self.trainer, self._settings.keep_checkpoints)
        if self._hollow:
            load_slices(self.trainer.policy, self._policy.model)
        self._files.load_state(self._policy)
        if self._owed:
            yield from self._make_up(self._owed)
        waiting_since = time.perf_counter()
        for dataset in self._datasets:
            self._seconds = {"wait": time.perf_counter() - waiting_since}
            self._on_result((yield from self._round(dataset)))
            waiting_since = time.perf_counter()
        self.trainer.control.should_training_stop = True

    def close(self) -> None:
        """Returns when nothing is being written any more."""
        if hasattr(self, "_files"):
            self._files.settle()
            self._replayer.close()

    def _make_up(self, owed: Owed) -> Iterator[list[MicroBatch]]:
        """The steps of the newest policy's round, made again for Adam's state, which the trainer was killed before it wrote."""
        name = owed.policy.name
        log.warning("no optimizer state of %s: its steps are made again from %s", name, owed.parent.name)
        try:
            outline, steps = self._read(owed.dataset, self._batch_layout(owed))
        except (DatasetError, TrainingError) as error:
            log.warning("the state of %s cannot be made again, Adam starts afresh: %s", name, error)
            self._files.restore(owed.policy)
            self._policy = owed.policy
            self._files.load_state(owed.policy)
            return
        # Scored in the coarser dtype of server and trainer, by which the old policy was chosen then.
        self._server_dtype = Canary.read(owed.policy.folder).dtype
        yield from self._steps(self._prepare(steps, outline.staleness))
        self.trainer.take_stats()
        if not self._files.restore(owed.policy):
            log.warning(
                "the steps of %s did not give its weights to the bit (other settings, or a GPU): Adam's state is theirs",
                name,
            )
        self.trainer.failure = None
        self._policy = owed.policy
        self._files.make_state(owed.policy)

    def _round(self, dataset: DatasetFolder) -> Generator[list[MicroBatch], None, Result]:
        try:
            outline, steps = self._read(dataset, self._layout)
        except (DatasetError, TrainingError) as error:
            if not self._keep_going:
                raise
            return self._skip(dataset, str(error))
        staleness = outline.staleness
        if not steps:
            return self._skip(dataset, self._why_nothing(outline))
        with self._timed("canary"):
            self._server_dtype = self._files.lead(lambda _: served_dtype(self._settings.policy_url))
            self._ready_canary(outline.prompts)
        with self._timed("old"):
            prepared = self._prepare(steps, staleness)
        with self._timed("state"):
            self._files.settle()
        with self._timed("optimizer"):
            yield from self._steps(prepared)
        stats = self.trainer.take_stats()
        self._seconds["train"] = sum(step.seconds for step in stats)
        self._seconds["optimizer"] -= self._seconds["train"]
        with self._timed("check"):
            moved = self.trainer.measure(largest(prepared.steps[-1]).first(CHECK_TOKENS))
            failure = self.trainer.failure or self.trainer.kl_fault(moved)
        kl = moved.mean("k3_old")
        record = self._record(dataset, outline, prepared, kl, failure, stats)
        if failure:
            return self._abort(dataset, record, failure)
        try:
            with self._timed("save"):
                scores = score_prompts(self.trainer.policy, self._prompts, self._canary_dtype)
                canary = make_canary(self._prompts, scores, self._scores, self._canary_dtype)
                saved = self._files.save(self._policy, dataset, canary, self._layout.tokens)
        except (OSError, SafetensorError) as error:
            return self._abort(dataset, record, f"cannot save {record.checkpoint}: {error}", consume=False)
        return self._publish(dataset, saved, scores, record)

    def _why_nothing(self, outline: Outline) -> str:
        """Why no call of a dataset is left."""
        stale, lost = outline.staleness.dropped, outline.unreplayed
        told = [f"{stale} calls are beyond train.max_staleness {self._settings.max_staleness}"] if stale else []
        told += [f"{sum(lost.values())} calls cannot be replayed: {', '.join(lost)}"] if lost else []
        return f"all {told[0]}" if len(told) == 1 else "; ".join(told) or NO_ROWS

    def _steps(self, prepared: Prepared) -> Iterator[list[MicroBatch]]:
        """The optimizer steps, until one is not made."""
        for index, step in enumerate(prepared.steps, start=1):
            self.trainer.rate = self.trainer.schedule.at(self._policy.version + index / len(prepared.steps))
            yield list(step.micro_batches)
            if self.trainer.failure:
                break

    def _read(self, dataset: DatasetFolder, layout: BatchLayout) -> tuple[Outline, list[Step]]:
        """The plan of all processes, and this one's part of it with its rows."""
        reading = Reading(dataset, self._policy, self._settings, self.trainer.team, self._replayer)
        with self._timed("replay"):
            reading.replay()
        with self._timed("read"):
            reading.read()
        with self._timed("plan"):
            outline = reading.plan(self._config(), layout, self._rule)
            return outline, reading.take(outline)

    def _batch_layout(self, owed: Owed) -> BatchLayout:
        """With the micro-batches that the round had: what is free now may choose others, whose sums round otherwise."""
        tokens = owed.micro_batch_tokens or self._layout.tokens
        if tokens <= self._layout.longest:
            return replace(self._layout, tokens=tokens)
        log.warning(
            "memory has no room for the %d tokens at a time of %s: its steps are made with %d, equal but for rounding",
            *(tokens, owed.policy.name, self._layout.tokens),
        )
        return self._layout

    def _prepare(self, steps: Sequence[Step], staleness: Staleness) -> Prepared:
        """This process's steps, with the log-probabilities that they need."""
        self.trainer.fresh = staleness.fresh
        if self._settings.kl_coef:
            steps = with_reference(self.trainer, steps, self.reference)
        return against_old(self.trainer, steps, self._settings, staleness, self._server_dtype)

    def _config(self) -> Any:
        return self.trainer.policy.config.get_text_config()

    def _ready_canary(self, drawn: list[Prompt]) -> None:
        """Sequences and their scores under the weights as they are; the same sequences through a run.

        They are taken over from the parent checkpoint, or drawn from the first dataset. They are scored in the
        trainer's dtype, or in the server's if that is the coarser one.
        """
        dtype = self.trainer.dtype
        if dtype == "float32" and self._server_dtype:
            dtype = self._server_dtype
        if self._canary_dtype == dtype:
            return
        if not self._prompts:
            self._prompts = self._files.lead(lambda _: _known_prompts(self._policy) or drawn)
        self._canary_dtype = dtype
        self._scores = score_prompts(self.trainer.policy, self._prompts, dtype)

    def _record(
        self,
        dataset: DatasetFolder,
        outline: Outline,
        prepared: Prepared,
        kl: float,
        failure: str | None,
        stats: Sequence[StepStats],
    ) -> round_record.RoundRecord:
        policy, settings, off = self._policy, self._settings, prepared.off_policy
        staleness = outline.staleness
        summary = round_record.summarize(outline.steps, stats, settings, self.trainer.rate)
        record = round_record.RoundRecord(
            round=dataset.round,
            version=policy.version if failure else policy.version + 1,
            checkpoint=policy.name if failure else checkpoint_name(policy.version + 1),
            dataset=dataset.sha256,
            error=failure,
            rows=outline.calls,
            reward_mean=math.nan if dataset.reward_mean is None else dataset.reward_mean,
            reward_std=math.nan if dataset.reward_std is None else dataset.reward_std,
            groups=dataset.groups,
            zero_spread_groups=dataset.zero_spread_groups,
            kl=kl,
            tokens_per_second=summary["forwarded_tokens"] / (self._seconds["train"] + self._seconds["optimizer"]),
            policy_versions=list(outline.versions),
            staleness_mean=staleness.mean,
            staleness_max=staleness.greatest,
            stale_calls=staleness.dropped,
            constrained_calls=outline.constrained,
            unreplayed_calls=outline.unreplayed,
            old_policy=prepared.old_policy,
            micro_batch_tokens=self._layout.tokens,
            effective_sample_share=off.effective_share,
            weight_max=off.max_weight if off.tokens else math.nan,
            bounded=off.bounded / off.tokens if off.tokens else 0.0,
            rejected_calls=off.rejected_calls / off.calls if off.calls else 0.0,
            agreement=agreement_of(
                stats[0].sums if stats else TokenSums(), self.trainer.dtype, self._server_dtype, settings, staleness
            ),
            seconds=self._seconds,
            **summary,
        )
        alarms = raised(record)
        for name, line in alarms if self._book else ():
            log.warning("round=%d %s: %s", dataset.round, name, line)
        return replace(record, alarms=[name for name, _ in alarms])

    def _publish(
        self, dataset: DatasetFolder, saved: Policy, scores: list[list[float]], record: round_record.RoundRecord
    ) -> Result:
        name = saved.folder.name
        with self._timed("swap"):
            swap = self._files.lead(lambda _: self._swap_in(saved))
        if swap.outcome == "refused":
            log.error("checkpoint=%s refused by the policy server: %s", name, swap.error)
            self._files.drop_state()
            self._files.lead(lambda book: book.refuse(saved.folder, str(swap.error)))
            self._go_back()
            error = f"the policy server refused {name}: {swap.error}"
            record = replace(record, version=self._policy.version, checkpoint=self._policy.name, error=error)
        else:
            reason = swap.error
            if reason:
                log.warning("checkpoint=%s is on disk but not swapped in: %s", name, reason)
            entry = Entry(EVENTS[swap.outcome], dataset.sha256, name, reason)
            self._files.lead(lambda book: book.ledger.append(entry))
            self._policy, self._scores = saved, scores
            self._files.keep_state()
        self._files.prune(self._settings.policy_url)
        self._files.lead(lambda book: self._note(book, record))
        return self._result(dataset, record, swap, error=record.error)

    def _swap_in(self, saved: Policy) -> Swap:
        settings, was_there = self._settings, self._server_dtype is not None
        patience_s = settings.publish_timeout_s
        return publish(
            settings.policy_url, saved.folder.name, saved.version, patience_s=patience_s, was_there=was_there
        )

    def _abort(
        self, dataset: DatasetFolder, record: round_record.RoundRecord, failure: str, *, consume: bool = True
    ) -> Result:
        """Without `consume` the fault is not the dataset's: it is taken again when the trainer is started anew."""
        log.error("round=%d aborted, policy %s stays: %s", dataset.round, self._policy.name, failure)
        record = replace(record, version=self._policy.version, checkpoint=self._policy.name, error=failure)
        self._go_back()

        def note(book: Checkpoints) -> None:
            try:
                if consume:
                    book.ledger.append(Entry("aborted", dataset.sha256, reason=failure))
                self._note(book, record)
            except OSError as error:
                log.error("round=%d cannot be recorded: %s", dataset.round, error)

        self._files.lead(note)
        return self._result(dataset, record, Swap("off", None), error=failure)

    def _note(self, book: Checkpoints, record: round_record.RoundRecord) -> None:
        round_record.append(book.root, record)
        self.trainer.report(record.round, figures(record))

    def _skip(self, dataset: DatasetFolder, reason: str) -> Result:
        log.warning("round=%d skipped: %s", dataset.round, reason)
        self._files.lead(lambda book: book.ledger.append(Entry("skipped", dataset.sha256, reason=reason)))
        return self._result(dataset, None, Swap("off", None), skipped=reason)

    def _result(
        self,
        dataset: DatasetFolder,
        record: round_record.RoundRecord | None,
        swap: Swap,
        *,
        skipped: str | None = None,
        error: str | None = None,
    ) -> Result:
        return Result(dataset.round, self._policy.version, self._policy.checkpoint, record, swap, skipped, error)

    def _go_back(self) -> None:
        """Puts weights and optimizer back to the newest good policy."""
        self._files.restore(self._policy)
        self._files.load_state(self._policy)
        self.trainer.failure = None

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[stage] = time.perf_counter() - started


def _known_prompts(policy: Policy) -> list[Prompt]:
    """The canary's sequences of the policy's checkpoint; none where it has no canary."""
    try:
        return [(prompt.prompt_ids, prompt.completion_ids) for prompt in Canary.read(policy.folder).prompts]
    except CheckpointError:
        return []

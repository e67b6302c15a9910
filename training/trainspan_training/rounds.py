"""The rounds: read a dataset, hand its steps to the trainer, check, save, publish.

`Rounds` is what the trainer iterates: between two steps, and before and after a round, its generator does the rest.
Model and Adam's state stay in memory from round to round.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainspan_schemas.checkpoint import Canary, CheckpointMeta, checkpoint_name
from trainspan_schemas.errors import CheckpointError, DatasetError
from trainspan_schemas.settings import TrainSettings

from . import metrics
from .canary import Prompt, draw_prompts, make_canary, score_prompts
from .checkpoints import Checkpoints
from .ledger import Entry
from .plan import MicroBatch, Step, plan_steps
from .policy import Policy
from .publish import EVENTS, Swap, publish
from .result import NO_ROWS, Result
from .rows import Row, make_rows
from .trainer import TransitionGRPOTrainer, kl_fault
from .transitions import Call, DatasetFolder, read_calls
from .weights import copy_companions, hash_weights, load_optimizer, restore_weights, save_optimizer, save_weights

__all__ = ["Rounds"]

log = logging.getLogger(__name__)

_CHECK_TOKENS = 4096
"""Padded tokens on which the divergence after the last step is measured."""


class Rounds:
    """An iterable of optimizer steps; set `trainer` before it is iterated. `on_result` hears of each dataset.

    With `keep_going` a dataset that cannot be read is skipped; else iterating raises DatasetError.
    """

    def __init__(
        self,
        datasets: Iterable[DatasetFolder],
        checkpoints: Checkpoints,
        policy: Policy,
        settings: TrainSettings,
        on_result: Callable[[Result], None],
        *,
        keep_going: bool,
    ) -> None:
        self._datasets = datasets
        self._checkpoints = checkpoints
        self._policy = policy
        self._settings = settings
        self._on_result = on_result
        self._keep_going = keep_going
        self._prompts: list[Prompt] = []
        self._scores: list[list[float]] = []
        self._seconds: dict[str, float] = {}
        self.trainer: TransitionGRPOTrainer

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        self._load_optimizer()
        waiting_since = time.perf_counter()
        for dataset in self._datasets:
            self._seconds = {"wait": time.perf_counter() - waiting_since}
            self._on_result((yield from self._round(dataset)))
            waiting_since = time.perf_counter()
        self.trainer.control.should_training_stop = True

    def _round(self, dataset: DatasetFolder) -> Generator[list[MicroBatch], None, Result]:
        try:
            with self._timed("read"):
                calls = read_calls(dataset)
            with self._timed("plan"):
                rows, steps = self._plan(calls, dataset)
        except DatasetError as error:
            if not self._keep_going:
                raise
            return self._skip(dataset, str(error))
        if not steps:
            return self._skip(dataset, NO_ROWS)
        with self._timed("canary"):
            self._ready_canary(rows)
        with self._timed("train"):
            for step in steps:
                yield list(step.micro_batches)
                if self.trainer.failure:
                    break
        with self._timed("check"):
            sample = max(steps[-1].micro_batches, key=lambda batch: batch.tokens.size)
            moved = self.trainer.measure(sample.first(_CHECK_TOKENS))
            failure = self.trainer.failure or kl_fault(moved, self._settings.max_kl)
        record = self._record(dataset, calls, steps, moved.mean("k3"), failure)
        if failure:
            return self._abort(dataset, record, failure)
        with self._timed("save"):
            scores = score_prompts(self.trainer, self._prompts)
            bf16 = bool(self.trainer.args.bf16)
            saved = self._save(dataset, make_canary(self._prompts, scores, self._scores, bf16=bf16))
        return self._publish(dataset, saved, scores, record)

    def _plan(self, calls: list[Call], dataset: DatasetFolder) -> tuple[list[Row], list[Step]]:
        rows = make_rows(calls, merge=self._settings.merge)
        vocabulary, context = self.trainer.policy.config.get_text_config().vocab_size, self._context()
        for row in rows:
            if len(row.tokens) > context:
                raise DatasetError(
                    f"rollout {row.rollout} has a sequence of {len(row.tokens)} tokens, above the model's {context}: "
                    "set [dataset] max_tokens"
                )
            if int(row.tokens.max()) >= vocabulary or int(row.tokens.min()) < 0:
                raise DatasetError(
                    f"rollout {row.rollout} has token ids outside the model's vocabulary of {vocabulary}: "
                    "it was sampled from another model"
                )
        steps = plan_steps(
            rows,
            steps=self._settings.steps_per_round,
            weights=self._settings.weights,
            micro_batch_tokens=self._settings.micro_batch_tokens,
            rng=np.random.default_rng([self._settings.seed, int(dataset.sha256[:16], 16)]),
        )
        return rows, steps

    def _context(self) -> int:
        """Greatest length of a sequence in tokens."""
        return int(getattr(self.trainer.policy.config.get_text_config(), "max_position_embeddings", None) or 2**31)

    def _ready_canary(self, rows: list[Row]) -> None:
        """Sequences and their scores under the weights as they are; the same sequences through a run.

        They are taken over from the parent checkpoint, or drawn from the first dataset.
        """
        if self._prompts:
            return
        try:
            canary = Canary.read(self._policy.folder)
            self._prompts = [(prompt.prompt_ids, prompt.completion_ids) for prompt in canary.prompts]
        except CheckpointError:
            self._prompts = draw_prompts(rows, self._context(), self._settings.seed)
        self._scores = score_prompts(self.trainer, self._prompts)

    def _record(
        self, dataset: DatasetFolder, calls: list[Call], steps: list[Step], kl: float, failure: str | None
    ) -> metrics.RoundRecord:
        policy, settings = self._policy, self._settings
        summary = metrics.summarize(steps, self.trainer.take_stats(), settings)
        versions = {call.policy_version for call in calls}
        known = [version for version in versions if version is not None]
        mismatch = bool(
            versions == {policy.version}
            and not self.trainer.args.bf16
            and summary["logp_diff_max"] > settings.engine_mismatch
        )
        if mismatch:
            log.warning(
                "round=%d logp_diff_max=%.3g exceeds engine_mismatch=%g: the server's log-probabilities are not those of "
                "version %d here; look for stale weights, constrained sampling, or rows of another run",
                *(dataset.round, summary["logp_diff_max"], settings.engine_mismatch, policy.version),
            )
        return metrics.RoundRecord(
            round=dataset.round,
            version=policy.version if failure else policy.version + 1,
            checkpoint=policy.name if failure else checkpoint_name(policy.version + 1),
            dataset=dataset.sha256,
            error=failure,
            rows=len(calls),
            rollouts=sum(step.rollouts for step in steps),
            reward_mean=math.nan if dataset.reward_mean is None else dataset.reward_mean,
            reward_std=math.nan if dataset.reward_std is None else dataset.reward_std,
            kl=kl,
            policy_versions=[min(known), max(known)] if known else [],
            engine_mismatch=mismatch,
            seconds=self._seconds,
            **summary,
        )

    def _save(self, dataset: DatasetFolder, canary: Canary) -> Policy:
        parent, trainer = self._policy, self.trainer
        model = trainer.policy

        def meta(weights_sha256: str | None) -> CheckpointMeta:
            return CheckpointMeta("full", parent.version + 1, parent.name, parent.base, dataset.sha256, weights_sha256)

        def fill(folder: Path) -> None:
            save_weights(model, folder)
            copy_companions(parent.folder, folder)
            canary.write(folder)
            meta(hash_weights(folder)).write(folder)

        folder = self._checkpoints.write(meta(None), fill, lambda path: save_optimizer(trainer.optimizer, model, path))
        self._checkpoints.prune(self._settings.keep_checkpoints)
        return Policy(folder, folder.name, parent.base, parent.version + 1)

    def _publish(
        self, dataset: DatasetFolder, saved: Policy, scores: list[list[float]], record: metrics.RoundRecord
    ) -> Result:
        with self._timed("swap"):
            swap = publish(self._settings.policy_url, saved.folder.name, saved.version)
        if swap.outcome == "refused":
            log.error("checkpoint=%s refused by the policy server: %s", saved.checkpoint, swap.error)
            self._checkpoints.refuse(saved.folder, str(swap.error))
            self._go_back()
            error = f"the policy server refused {saved.checkpoint}: {swap.error}"
            record = replace(record, version=self._policy.version, checkpoint=self._policy.name, error=error)
        else:
            reason = swap.error
            if reason:
                log.warning("checkpoint=%s is on disk but not swapped in: %s", saved.checkpoint, reason)
            self._checkpoints.ledger.append(Entry(EVENTS[swap.outcome], dataset.sha256, saved.checkpoint, reason))
            self._policy, self._scores = saved, scores
        metrics.append(self._checkpoints.root, record)
        return self._result(dataset, record, swap, error=record.error)

    def _abort(self, dataset: DatasetFolder, record: metrics.RoundRecord, failure: str) -> Result:
        log.error("round=%d aborted, policy %s stays: %s", dataset.round, self._policy.name, failure)
        self._checkpoints.ledger.append(Entry("aborted", dataset.sha256, reason=failure))
        self._go_back()
        metrics.append(self._checkpoints.root, record)
        return self._result(dataset, record, Swap("off", None), error=failure)

    def _skip(self, dataset: DatasetFolder, reason: str) -> Result:
        log.warning("round=%d skipped: %s", dataset.round, reason)
        self._checkpoints.ledger.append(Entry("skipped", dataset.sha256, reason=reason))
        return self._result(dataset, None, Swap("off", None), skipped=reason)

    def _result(
        self,
        dataset: DatasetFolder,
        record: metrics.RoundRecord | None,
        swap: Swap,
        *,
        skipped: str | None = None,
        error: str | None = None,
    ) -> Result:
        return Result(dataset.round, self._policy.version, self._policy.checkpoint, record, swap, skipped, error)

    def _go_back(self) -> None:
        """Puts weights and optimizer back to the newest good policy."""
        restore_weights(self.trainer.policy, self._policy.folder)
        self._load_optimizer()
        self.trainer.failure = None

    def _load_optimizer(self) -> None:
        name = self._policy.checkpoint
        file = self._checkpoints.optimizer_file(name) if name else None
        if file and not file.exists():
            log.warning("no optimizer state of %s: Adam starts afresh", name)
        load_optimizer(self.trainer.optimizer, self.trainer.policy, file)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[stage] = time.perf_counter() - started

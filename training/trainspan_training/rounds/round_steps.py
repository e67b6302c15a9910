"""The steps of a round: reads the dataset, adds the log-probabilities that the steps need, and hands them to the trainer.

A round that is repeated to rebuild Adam's state takes the same path as a new one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainspan_schemas.command_events import TrainingProgress
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.checkpoints.lineage import Lineage
from trainspan_training.constraints.replay import Replayer, serialized_tokenizer
from trainspan_training.data.dataset import DatasetFolder
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.loss_weights import Rule
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.data.sequences import ChatTurns
from trainspan_training.data.steps import Step
from trainspan_training.metrics.signal import Signal
from trainspan_training.metrics.signal_sample import SignalSample
from trainspan_training.metrics.stage_clock import StageClock
from trainspan_training.metrics.token_files import TokenFile
from trainspan_training.metrics.token_recorder import BYTES, TokenRecorder
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer
from trainspan_training.objective.schedule import TrustRegion
from trainspan_training.rounds.old_policy import Prepared, Staleness, against_old, with_reference
from trainspan_training.rounds.reading import Outline, RoundReading

__all__ = ["RoundSteps"]


class RoundSteps:
    """Call `read`, `prepare` and `make` for each round, in this order; then `token_file`.

    `reference` is the model that the run started from, if `kl_coef` needs it and it is not the policy without its adapter.
    `turns` are those of the chat template, if observation tokens are wanted.
    """

    def __init__(
        self,
        trainer: TransitionGRPOTrainer,
        settings: TrainSettings,
        rule: Rule,
        clock: StageClock,
        on_progress: Callable[[TrainingProgress], None],
        *,
        reference: Any,
        turns: ChatTurns | None,
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._rule = rule
        self._clock = clock
        self._on_progress = on_progress
        self._reference = reference
        self._config = trainer.policy.config.get_text_config()
        size, tokenizer = int(self._config.vocab_size), trainer.processing_class
        self._replayer = Replayer(size, lambda: serialized_tokenizer(tokenizer, size))
        self._turns = turns
        self._recorder: TokenRecorder | None = None
        self._sample: SignalSample

    def close(self) -> None:
        """Ends the grammar process."""
        self._replayer.close()

    def read(
        self, dataset: DatasetFolder, policy: Policy, layout: BatchLayout, lineage: Lineage
    ) -> tuple[Outline, list[Step]]:
        """The plan for all processes, and this process's steps with their rows. Raises DatasetError or TrainingError."""
        team = self._trainer.team
        reading = RoundReading(dataset, policy, self._settings, team, self._replayer, lineage, self._turns)
        with self._clock.timed("replay"):
            reading.replay()
        with self._clock.timed("read"):
            reading.read()
        with self._clock.timed("plan"):
            outline = reading.plan(self._config, layout, self._rule)
            return outline, reading.build_steps(outline)

    def prepare(self, steps: Sequence[Step], staleness: Staleness, server_dtype: str | None) -> Prepared:
        """This process's steps with the log-probabilities that they need."""
        self._trainer.fresh = staleness.fresh
        if self._settings.kl_coef:
            steps = with_reference(self._trainer, steps, self._reference)
        return against_old(self._trainer, steps, self._settings, staleness, server_dtype)

    def make(
        self, outline: Outline, prepared: Prepared, round_: int, rounds: int, gate: float
    ) -> Iterator[list[MicroBatch]]:
        """Yields the optimizer steps of a dataset until one fails or the policy has moved to `target_kl`.

        Adam's state has so many `rounds`. `gate` is the share of their rate that is used; k3 grows with its square. The figures
        of tokens, and the sample of the test for a signal, are those of the first pass.
        """
        trainer, steps = self._trainer, prepared.steps
        count = len(steps) * self._settings.passes
        trainer.recorder = self._recorder = self._new_recorder(len(steps))
        trainer.sampler = self._sample = SignalSample(outline.labels, trainer.team)
        # Against an older sampler k3 is not the movement of this round.
        is_movement = prepared.old_policy == "recompute" or outline.staleness.fresh
        trainer.trust = TrustRegion(self._settings.target_kl * gate**2 if is_movement else 0.0)
        self._on_progress(TrainingProgress(round_, steps=count))
        for index in range(count):
            if index == len(steps):
                trainer.recorder = trainer.sampler = None
            trainer.rate = gate * trainer.schedule.at(rounds + (index + 0.5) / count)
            step, began = steps[index % len(steps)], time.perf_counter()
            yield list(step.micro_batches)
            seconds = time.perf_counter() - began
            self._on_progress(TrainingProgress(round_, None, index + 1, count, step.forwarded, seconds))
            if trainer.failure or trainer.trust.reached:
                break

    def _new_recorder(self, steps: int) -> TokenRecorder | None:
        trainer, settings = self._trainer, self._settings
        most = int(settings.token_figures_mib * 2**20 / BYTES / trainer.team.size)
        return TokenRecorder(trainer.scorer, settings, steps=steps, most=most) if settings.token_figures_mib else None

    def signal(self) -> Signal:
        """Whether the rewards of the round depend on what was sampled."""
        return self._sample.test(self._settings.seed)

    @property
    def unrecorded_tokens(self) -> int:
        """Number of trained tokens, of all processes, without figures of their own."""
        return sum(self._trainer.team.gather(self._recorder.left_out)) if self._recorder else 0

    def token_file(self, dataset: DatasetFolder, prepared: Prepared) -> TokenFile | None:
        """The figures of the tokens that the steps trained; None if they are not wanted."""
        if (recorder := self._recorder) is None:
            return None
        steps, old_policy = len(prepared.steps), prepared.old_policy
        return TokenFile(dataset, recorder.drain(), recorder.left_out, steps, old_policy, self._settings)

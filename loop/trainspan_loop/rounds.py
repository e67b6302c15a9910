"""The loop itself: evaluate; in each round collect rollouts, build the dataset, train and swap; evaluate again."""

import json
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from trainspan_loop.checks.integrity import Check, dataset_checks, reward_checks, signal_check, training_checks
from trainspan_loop.checks.skipping import skip_check, skip_reason, skipped_rounds
from trainspan_loop.checks.stopping import stop_reason
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.services import Services
from trainspan_loop.processes.stages import Stages
from trainspan_loop.sampling.choice import choose_sampler
from trainspan_loop.sampling.sampler import SampledRound, is_followed_by_validation
from trainspan_loop.state.reward_records import read_rewards
from trainspan_loop.state.round_record import PolicyOutcome, round_record
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import LoopTasks
from trainspan_loop.trials.trials import Trials
from trainspan_loop.trials.verdict import refused_rounds
from trainspan_loop.validation import Validations
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.artifacts.run_files import record_of
from trainspan_schemas.artifacts.run_records import RoundRecord, rounds_in
from trainspan_schemas.config.policy_scope import Policy
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.home import policy_dir

__all__ = ["Loop"]


class Loop:
    """One run. `config` is passed to every child command; `folder` has the state needed to resume after a kill."""

    def __init__(
        self, settings: Settings, tasks: LoopTasks, config: Path | None, folder: RunFolder, screen: Screen
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._screen = screen
        self._services = Services(settings, config, folder, screen)
        stages = Stages(settings, self._services, folder, screen)
        self._stages = stages
        self._validation = Validations(settings, tasks, self._services, stages, folder, screen)
        self._trials = Trials(settings, tasks.trial, self._services, stages, folder, screen)
        self._sampler = choose_sampler(settings, tasks, stages, folder, screen)
        self._recorded_at = time.monotonic()

    def run(self) -> None:
        """Runs or resumes. Raises ProcessError, ConfigError, TaskFileError."""
        loop, folder = self._settings.loop, self._folder
        try:
            self._services.start()
            done = {record["round"] for record in rounds_in(folder.records())}
            self._sampler.open()
            self._recorded_at = time.monotonic()
            self._recorded_at += self._sampler.between_rounds(self._validation.run, 0, loop.eval_tasks, probe=True)
            self._sampler.alongside(self._trials.begin_trials)
            round_, ended = 0, stop_reason(loop, folder.records(), 0)
            while ended is None:
                round_ += 1
                if round_ not in done and not self._round(round_):
                    round_ -= 1
                    ended = f"no round began within [loop] max_hours = {loop.max_hours:g}"
                    break
                if is_followed_by_validation(loop, round_):
                    self._recorded_at += self._sampler.between_rounds(self._validation.run, round_, loop.val_tasks)
                ended = stop_reason(loop, folder.records(), round_)
            self._screen.note(ended)
            begun = self._sampler.stop()
            self._stages.resume()
            last = self._last_published(round_)
            while round_ < last:
                round_ += 1
                if round_ not in done:
                    self._screen.note(f"round {round_} is finished first: the trainer has its dataset or a later one")
                    self._round(round_)
            if untrained := [later for later in begun if later > round_]:
                self._screen.note(f"rollouts of {len(untrained)} later rounds were begun and are not trained")
            if skipped := skipped_rounds(folder.records()):
                self._screen.note(
                    f"{len(skipped)} of {round_} rounds were skipped, the last one: {skipped[-1]['skipped']}"
                )
            if refused := refused_rounds(folder.records()):
                self._screen.note(
                    f"{len(refused)} of {round_} new versions were refused, the last one: {refused[-1].get('refused')}"
                )
            self._validation.run(round_, loop.eval_tasks, probe=True)
        finally:
            self._sampler.stop()
            self._services.stop()
            self._sampler.close()
        folder.finish("finished", ended=ended, untrained_rounds=untrained)

    def _last_published(self, round_: int) -> int:
        """The last round whose dataset the trainer has; this one if there is none later."""
        ahead = range(round_ + 1, round_ + self._settings.loop.overlap + 1)
        return max((later for later in ahead if self._stages.has_dataset(later)), default=round_)

    def _round(self, round_: int) -> bool:
        """Makes a round, and records it; returns whether there was time for it.

        Its `total` seconds are those since the record before, without those of validations, so that all records add up to the run's
        time, overlapped or not.
        """
        self._sampler.begin_round(round_)
        self._screen.round(round_, self._settings.loop.rounds)
        sampled = self._sampler.take_round(round_)
        if sampled is None:
            return False
        outcomes = {policy: self._outcome(round_, policy, sampled) for policy in self._stages.policies}
        seconds: defaultdict[str, float] = defaultdict(float, sampled.seconds)
        for outcome in outcomes.values():
            for stage, spent in outcome.seconds.items():
                seconds[stage] += spent
        recorded_at = time.monotonic()
        seconds["total"] = recorded_at - self._recorded_at
        record = round_record(round_, sampled.rollout, outcomes, sampled.checks, seconds)
        self._recorded_at = recorded_at
        self._folder.append(record)
        self._screen.record(record)
        return True

    def _outcome(self, round_: int, policy: Policy, sampled: SampledRound) -> PolicyOutcome:
        """Waits until the policy's dataset of the round is trained, if there is one."""
        nothing, seconds = dict(sampled.nothing), {}
        if self._stages.take_turns and policy != self._stages.policies[0]:
            began = time.monotonic()
            nothing |= self._stages.dataset(round_, are_stored=sampled.are_stored, policies=[policy])
            seconds["dataset"] = time.monotonic() - began
        if policy in nothing:
            why = nothing[policy]
            checks = [skip_check(self._records(policy), why.reason).record()]
            return PolicyOutcome(self._stages.version(policy), why.figures, {}, why.reason, checks, seconds)
        dataset = dataset_dir(policy_dir(self._folder.datasets, policy), round_)
        manifest = json.loads(manifest_path(dataset).read_bytes())
        checks = [check.record() for check in [*dataset_checks(manifest), *self._reward_checks(round_, dataset)]]
        self._screen.stage("training" if policy is None else f"training {policy}")
        began = time.monotonic()
        event = self._stages.trained(round_, policy)
        seconds["train"] = time.monotonic() - began
        self._folder.note_training(None)
        self._screen.stage("")
        skipped = skip_reason(manifest, event.skipped)
        trial = self._sampler.alongside(self._trials.judge, round_)
        new_checks = [*training_checks(event), skip_check(self._records(policy), skipped), *self._trials.checks(trial)]
        new_checks += [] if skipped else [signal_check(event)]
        checks += [check.record() for check in new_checks]
        if trial is None:
            return PolicyOutcome(event.version, manifest, asdict(event), skipped, checks, seconds)
        seconds["trial"] = trial.seconds
        refusal = trial.refused, trial.verdict.record()
        return PolicyOutcome(trial.in_service, manifest, asdict(event), skipped, checks, seconds, *refusal)

    def _records(self, policy: Policy) -> list[RoundRecord]:
        """The records of rounds as the policy sees them."""
        return [record_of(record, policy) for record in rounds_in(self._folder.records())]

    def _reward_checks(self, round_: int, dataset: Path) -> list[Check]:
        rewards = read_rewards(self._sampler.ledgers(round_), dataset)
        return [] if rewards is None else reward_checks(rewards)

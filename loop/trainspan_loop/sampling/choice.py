"""Picks the sampler that the settings ask for, and checks them."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.stages import Stages
from trainspan_loop.sampling.live_sampler import LiveSampler
from trainspan_loop.sampling.round_sampler import RoundSampler
from trainspan_loop.sampling.sampler import Sampler
from trainspan_loop.sampling.stream_sampler import StreamSampler
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import LoopTasks
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError

VINE = "vine"
"""The credit of values that branches measured."""

__all__ = ["check_numbers", "check_sampling", "choose_sampler"]

_LEAST: Final[Mapping[str, Sequence[str]]] = {
    "loop.{} = {} must be at least 0": (
        "rounds",
        "live_wait_s",
        "live_feedback_s",
        "eval_tasks",
        "val_tasks",
        "eval_every",
    ),
    "loop.{} = {} must be at least 1": ("live_rewards", "tasks_per_round", "eval_n", "patience"),
    "rollouts.{} = {} must be at least 1": ("n", "concurrency"),
}


def check_numbers(settings: Settings) -> None:
    """Raises ConfigError if a number is one with which no run could begin, or go on, or end."""
    for message, names in _LEAST.items():
        section, least = message.partition(".")[0], int(message[-1])
        for name in names:
            if (value := getattr(getattr(settings, section), name)) is not None and not value >= least:
                raise ConfigError(message.format(name, value))
    if (hours := settings.loop.max_hours) is not None and not hours > 0:
        raise ConfigError(f"loop.max_hours = {hours:g} must be greater than 0")
    if (mean := settings.loop.stop_at) is not None and not math.isfinite(mean):
        raise ConfigError(f"loop.stop_at = {mean:g} is no mean that a validation could reach")


def choose_sampler(settings: Settings, tasks: LoopTasks, stages: Stages, folder: RunFolder, screen: Screen) -> Sampler:
    if tasks.train is None:
        return LiveSampler(settings, stages, folder, screen)
    chosen = StreamSampler if settings.loop.mode == "stream" else RoundSampler
    return chosen(settings, tasks.train, stages, folder, screen)


def check_sampling(settings: Settings) -> None:
    """Raises ConfigError if rollouts cannot run ahead of training as far as the settings say, or their credit needs branches."""
    loop = settings.loop
    if loop.overlap < 0:
        raise ConfigError(f"loop.overlap = {settings.loop.overlap}: at least 0")
    if loop.target is None and (loop.overlap or loop.mode != "rounds"):
        raise ConfigError(
            "loop.overlap and loop.mode are for rollouts that the loop makes: set loop.target, or neither"
        )
    if loop.target is None and (loop.policies_in_turn or settings.serving.sleep):
        name = "[advanced] loop.policies_in_turn" if loop.policies_in_turn else "serving.sleep"
        raise ConfigError(
            f"{name} is for rollouts that the loop makes, and agents of others need the server at any time: set it to false"
        )
    if loop.policies_in_turn and (loop.overlap or loop.mode == "stream"):
        name = "loop.overlap" if loop.overlap else 'loop.mode = "stream"'
        raise ConfigError(f"{name} trains all policies at the same time: set [advanced] loop.policies_in_turn = false")
    if VINE in (settings.dataset.credit, *(policy.credit for policy in settings.policies.values())):
        raise ConfigError(
            f"credit {VINE!r} needs branches, which the loop does not make: it would be credit 'identical'; choose another, or build "
            f"a dataset of branched rollouts with `trainspan dataset --credit {VINE}`"
        )
    limit = settings.train.max_staleness
    if limit is not None and limit < loop.overlap:
        raise ConfigError(
            f"train.max_staleness = {limit} would drop calls that loop.overlap = {loop.overlap} makes: "
            "raise the one or lower the other"
        )
    if limit is not None and limit < 1 and loop.mode == "stream":
        raise ConfigError(
            f'train.max_staleness = {limit} would drop calls that loop.mode = "stream" makes, which are at least one version behind: '
            "raise it"
        )
    if settings.serving.sleep and (loop.overlap or loop.mode == "stream"):
        name = "loop.overlap" if loop.overlap else 'loop.mode = "stream"'
        raise ConfigError(f"{name} needs a server that answers during training: set serving.sleep = false")

"""Collects a sample of a round's tokens, from the forward passes of its steps, for the test of `signal`.

Each rollout gets the same number of tokens, spread over its calls. The weights move between the steps; under the null
hypothesis a rollout's own reward has had no influence on its gradient, so that the test stays valid.
"""

import numpy as np
import torch
from torch import Tensor

from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.devices.team import Team
from trainspan_training.metrics.signal import NO_SIGNAL, RolloutGradients, RolloutLabels, Signal, signal_of
from trainspan_training.objective.logprobs import Probe

__all__ = ["SignalSample"]

_TOKENS = 2000
"""Greatest number of tokens of a round that are sampled, of all processes: the rows of a rollout may be in several."""


class SignalSample:
    """The sample of one process of the `team`, of the rollouts in `labels`."""

    def __init__(self, labels: RolloutLabels, team: Team) -> None:
        self._labels = labels
        self._team = team
        self._left_R = np.full(len(labels.groups), max(1, _TOKENS // max(1, len(labels.groups) * team.size)))
        self._parts: list[tuple[np.ndarray, Tensor, Tensor]] = []

    def probe(self, batch: MicroBatch) -> Probe | None:
        """The tokens of a micro-batch that are sampled."""
        of_call = self._labels.of_call
        rollouts_N = np.array([of_call[call] for call in batch.calls.tolist()], dtype=np.int64)
        chosen = []
        for rollout in np.unique(rollouts_N):
            tokens = np.flatnonzero(rollouts_N == rollout)
            count = min(len(tokens), int(self._left_R[rollout]))
            self._left_R[rollout] -= count
            chosen.append(tokens[np.linspace(0, len(tokens) - 1, count).round().astype(np.int64)])
        if not chosen or not (tokens := np.concatenate(chosen)).size:
            return None

        def receive(hidden: Tensor, gradients: Tensor) -> None:
            self._parts.append((rollouts_N[tokens], hidden.float(), gradients.float()))

        return Probe(torch.from_numpy(tokens), receive)

    def test(self, seed: int) -> Signal:
        """The test over all processes' samples; NO_SIGNAL if it cannot be made."""
        mine = [(owner, hidden.cpu().numpy(), grads.cpu().numpy()) for owner, hidden, grads in self._parts]
        parts = [part for parts in self._team.gather(mine) for part in parts]
        return self._team.share(lambda: self._tested(parts, seed))

    def _tested(self, parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], seed: int) -> Signal:
        if not parts:
            return NO_SIGNAL
        owner, hidden, gradients = (np.concatenate([part[index] for part in parts]) for index in range(3))
        seen, rollouts = np.unique(owner, return_inverse=True)
        kernel = RolloutGradients(rollouts, hidden, gradients).kernel()
        labels = self._labels
        advantages, groups = [labels.advantages[index] for index in seen], [labels.groups[index] for index in seen]
        return signal_of(kernel, advantages, groups, np.random.default_rng(seed)) or NO_SIGNAL

"""Collects a sample of a round's tokens, from the forward passes of its steps, for the test of `signal`.

Each rollout gets the same number of tokens, spread over its calls. The weights move between the steps; under the null
hypothesis a rollout's own reward has had no influence on its gradient, so that the test stays valid.
"""

import numpy as np
import torch
from torch import Tensor

from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.devices.team import Team
from trainspan_training.metrics.signal import NO_SIGNAL, CallGradients, CallLabels, Signal, signal_of
from trainspan_training.objective.logprobs import Probe

__all__ = ["SignalSample"]

_TOKENS = 2000
"""Greatest number of tokens of a round that are sampled, of all processes: the rows of a rollout may be in several."""


class SignalSample:
    """The sample of one process of the `team`, of the rollouts in `labels`."""

    def __init__(self, labels: CallLabels, team: Team) -> None:
        self._labels = labels
        self._team = team
        rollouts = max(labels.rollouts, default=0) + 1
        self._left_R = np.full(rollouts, max(1, _TOKENS // (rollouts * team.size)))
        self._parts: list[tuple[np.ndarray, Tensor, Tensor]] = []

    def probe(self, batch: MicroBatch) -> Probe | None:
        """The tokens of a micro-batch that are sampled."""
        of_call = self._labels.of_call
        calls_N = np.array([of_call[call] for call in batch.calls.tolist()], dtype=np.int64)
        rollouts_N = np.asarray(self._labels.rollouts)[calls_N]
        chosen = []
        for rollout in np.unique(rollouts_N):
            tokens = np.flatnonzero(rollouts_N == rollout)
            count = min(len(tokens), int(self._left_R[rollout]))
            self._left_R[rollout] -= count
            chosen.append(tokens[np.linspace(0, len(tokens) - 1, count).round().astype(np.int64)])
        if not chosen or not (tokens := np.concatenate(chosen)).size:
            return None

        def receive(hidden: Tensor, gradients: Tensor) -> None:
            self._parts.append((calls_N[tokens], hidden.float(), gradients.float()))

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
        seen, calls = np.unique(owner, return_inverse=True)
        labels = self._labels.select(seen)
        kernel = CallGradients(calls, hidden, gradients).kernel(labels.rollouts)
        return signal_of(kernel, labels, np.random.default_rng(seed)) or NO_SIGNAL

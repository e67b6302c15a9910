"""Collects the figures of each trained token during a round's steps, up to a number of bytes."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.objective.logprobs import Scorer, Scores
from trainspan_training.objective.options import clip_range
from trainspan_training.objective.token_stats import clip_sides, importance_ratios

__all__ = ["BYTES", "TokenFigures", "TokenRecorder"]

BYTES = 17
"""Bytes of a token: four numbers in float32, and one byte for the clip."""


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Figures of N trained tokens. The tokens of a call are adjacent and in order."""

    calls: NDArray[np.int64]
    """(N,) index in the dataset of the token's call."""
    steps: NDArray[np.int32]
    """(N,) optimizer step, from 1."""
    numbers: NDArray[np.float32]
    """(4, N) log-probabilities under the weights right before the step and under the old policy, entropies, and ratios."""
    clipped: NDArray[np.int8]
    """(N,) as of `clip_sides`."""


class TokenRecorder:
    """The trained tokens of one process in one round. Keeps whole calls, at most `most` tokens.

    Each of the `steps` has an equal share, and what one leaves is the next one's. `left_out` counts the other tokens.
    """

    def __init__(self, scorer: Scorer, settings: TrainSettings, *, steps: int, most: int) -> None:
        self._scorer = scorer
        self._by_call = settings.ratio == "call"
        self._clip = clip_range(settings)
        self._steps = steps
        self._most = most
        self._kept = 0
        self._step = 1
        self._open: list[tuple[NDArray[np.int64], Tensor, Tensor]] = []
        self._done: list[TokenFigures] = []
        self._left = 0
        self.left_out = 0

    @torch.no_grad()
    def add(self, batch: MicroBatch, scores: Scores) -> None:
        """Measures a micro-batch; the figures stay on the device until the step ends, so that nothing waits for it."""
        chosen = self._choose(batch.calls)
        if not chosen.any():
            return
        tensor = self._scorer.tensor
        logprobs, old = scores.logprobs.double(), tensor(batch.old)
        ratios = importance_ratios(logprobs, old, tensor(batch.calls) if self._by_call else None)
        forced = None if batch.limits is None else tensor(batch.limits.forced())
        sides = clip_sides(ratios, tensor(batch.advantages), forced, self._clip)
        values = torch.stack([logprobs, old, scores.entropies.double(), ratios]).float()
        if not chosen.all():
            places = tensor(np.flatnonzero(chosen))
            values, sides = values[:, places], sides[places]
        self._open.append((batch.calls[chosen], values, sides))

    def end_step(self, *, is_made: bool) -> None:
        """Moves the step's figures to main memory, or drops them if it was only measured."""
        for calls, values, sides in self._open if is_made else ():
            steps = np.full(len(calls), self._step, dtype=np.int32)
            self._done.append(TokenFigures(calls, steps, values.cpu().numpy(), sides.cpu().numpy()))
        if is_made:
            self.left_out += self._left
        self._open, self._left = [], 0
        self._step += 1

    def drain(self) -> TokenFigures:
        """The figures of all steps."""
        nothing = (np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros((4, 0), np.float32), np.zeros(0, np.int8))
        done, self._done = [TokenFigures(*nothing), *self._done], []
        return TokenFigures(
            calls=np.concatenate([figures.calls for figures in done]),
            steps=np.concatenate([figures.steps for figures in done]),
            numbers=np.concatenate([figures.numbers for figures in done], axis=1),
            clipped=np.concatenate([figures.clipped for figures in done]),
        )

    def _choose(self, calls: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the tokens (N,) are kept."""
        room = self._most * self._step // self._steps - self._kept
        chosen = np.ones(len(calls), dtype=np.bool_)
        if len(calls) > room:
            for call, count in zip(*np.unique(calls, return_counts=True), strict=True):
                if count <= room:
                    room -= int(count)
                else:
                    chosen[calls == call] = False
        self._kept += int(chosen.sum())
        self._left += int((~chosen).sum())
        return chosen

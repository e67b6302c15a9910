"""How rows go through the model: padded side by side, or as prefix trees; chosen by device and shape, or forced.

On a GPU compiled flex attention computes only what a token sees, so that a tree saves what rows share. On a CPU a tree's
attention is a dense mask whose cost grows with the square of the tree: it pays where the layers are wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.settings import TrainSettings

from .batches import PASSES_PER_BUDGET, Limits, MicroBatch, WeightedRow, padded
from .tree import TreeCost, shared, unique_tokens

__all__ = ["LOGITS", "Forwarding", "forwarding_of", "refusal"]

_DENSE_TOKENS = 4096
"""Greatest tree behind a dense mask: its scores are a square of this edge for each head."""
_DENSE_PAIR = 4.0
"""A masked pair costs about so many times the floating-point operations that it takes, against the layers' products."""
_WORTH = 0.9
"""A tree is chosen where it costs less than this share of the padded rows."""
LOGITS = 2**28
"""Greatest number of logits (trained tokens times vocabulary) in one pass: 1 GiB in float32, several times."""


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Cuts rows into micro-batches."""

    mode: str
    """`padded`, `tree` or `auto`."""
    limits: Limits
    pair: float
    """Cost of a pair of tokens in attention, in units of a token's cost in the layers."""
    dense: bool
    """Whether a tree's attention is a dense mask."""
    processes: int = 1

    def cut(self, rows: Sequence[WeightedRow], n_step: int) -> list[MicroBatch]:
        """Micro-batches of the rows of one step, at least one for each process where there are rows enough."""
        cheaper = self.mode == "auto" and self._tree_cost(rows) < _WORTH * self._padded_cost(rows)
        if self.mode != "tree" and not cheaper:
            return padded(rows, self._split(rows, sum(len(item.row.tokens) for item in rows)), n_step)
        limits = self._split(rows, unique_tokens([item.row for item in rows]))
        cost = TreeCost(
            pair=self.pair * _DENSE_PAIR if self.dense else 0.0,
            a_pass=self.limits.tokens / PASSES_PER_BUDGET if self.dense else 0.0,
            blocks=not self.dense,
        )
        if self.dense:
            limits = replace(limits, tokens=min(limits.tokens, _DENSE_TOKENS))
        return shared(rows, limits, n_step, cost)

    def _split(self, rows: Sequence[WeightedRow], tokens: int) -> Limits:
        """The limits, lowered so that every process gets a part of these tokens."""
        if self.processes == 1:
            return self.limits
        return replace(self.limits, tokens=min(self.limits.tokens, -(-tokens // self.processes)))

    def _padded_cost(self, rows: Sequence[WeightedRow]) -> float:
        return sum(length + self.pair * length**2 / 2 for length in (len(item.row.tokens) for item in rows))

    def _tree_cost(self, rows: Sequence[WeightedRow]) -> float:
        unique = unique_tokens([item.row for item in rows])
        if not self.dense:
            return unique + self.pair * unique * max(len(item.row.tokens) for item in rows) / 2
        trees = {item.row.group for item in rows}
        edge = unique / len(trees)
        return unique + self.pair * _DENSE_PAIR * edge**2 * len(trees)


def forwarding_of(settings: TrainSettings, config: Any, *, cuda: bool, processes: int = 1) -> Forwarding:
    """For a model of this configuration. Raises ConfigError where `forward = "tree"` cannot be had with it."""
    text = config.get_text_config()
    reason = refusal(text)
    if settings.forward == "tree" and reason:
        raise ConfigError(f'train.forward = "tree" cannot be used: {reason}; leave it out')
    hidden = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    layer = 4 * hidden**2 + 3 * hidden * inner
    return Forwarding(
        mode="padded" if reason else settings.forward,
        limits=Limits(settings.micro_batch_tokens, max(1, LOGITS // int(text.vocab_size))),
        pair=2 * hidden / layer,
        dense=not cuda,
        processes=processes,
    )


def refusal(text: Any) -> str | None:
    """Why a model cannot forward a prefix tree, if so: some layers would not look at the mask."""
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"the model has layers of type {', '.join(sorted(kinds))}"
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True) and not getattr(text, "layer_types", None):
        return f"the model's attention has a sliding window of {window} tokens"
    return None

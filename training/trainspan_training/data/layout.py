"""Layout of rows in a forward pass: padded, packed end to end, or as prefix trees; the cheapest, unless it is set.

On a GPU rows are packed, or form trees if they share many tokens: flash or compiled flex attention computes only
visible pairs. On a CPU attention runs tree by tree: each row costs a separate call, which pays off if layers are wide,
and a tree costs a dense mask, which pays off if rows share many tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainspan_schemas.config.settings import ModelSettings
from trainspan_schemas.errors import ConfigError
from trainspan_training.data.cuts import PASS, Cut, TreeCost, packed, padded, shared, unique_tokens
from trainspan_training.data.sequences import TokenSequence

__all__ = ["DENSE_TOKENS", "MOST_TOKENS", "BatchLayout", "TokenBudget", "batch_layout", "pass_tokens", "refusal"]

_DENSE_PAIR = 4.0
"""Cost of a masked pair per floating-point operation, relative to the layers' matrix products."""
_CALL = 2.5e6
"""On a CPU a separate attention call for a row costs about as much as one token going through this many weights."""
_WORTH = 0.9
"""Trees are chosen if they cost less than this share of what rows cost: the estimate for trees is less accurate."""
_GPU_PASS = 2048
"""On a GPU a forward and backward pass has a fixed cost of about this many tokens, for launching kernels."""

MOST_TOKENS = 16384
"""Default number of tokens in a micro-batch, if memory has room for them."""

DENSE_TOKENS = 4096
"""Greatest number of tokens in a tree with a dense mask, which is a square of this edge."""


def pass_tokens(*, cuda: bool) -> int:
    """The fixed cost of a forward and backward pass, in tokens."""
    return _GPU_PASS if cuda else PASS


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The sizes that memory has room for."""

    tokens: int
    """Number of tokens in a micro-batch."""
    longest: int
    """Length of the longest row; a row longer than `tokens` is a micro-batch by itself."""
    kept: int
    """Greatest micro-batch, in tokens, whose activations are kept; those of a larger one are recomputed."""
    logits: int
    """Number of logits at a time."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Cuts rows into micro-batches."""

    mode: str
    """`padded`, `packed`, `tree` or `auto`."""
    tokens: int
    """Greatest number of tokens in a forward pass, padding included."""
    pair: float
    """Cost of a pair of tokens in attention, in units of a token's cost in the layers."""
    dense: bool
    """Whether attention runs tree by tree, with a dense mask for each tree that branches."""
    longest: int = 2**62
    """Longest row that memory has room for."""
    call: float = 0.0
    """Cost of a separate attention call for a row, in units of a token's cost in the layers."""
    processes: int = 1

    def cut(self, rows: Sequence[TokenSequence]) -> list[Cut]:
        """Micro-batches of one step's rows; at least one per process if there are enough rows."""
        if self.mode != "auto":
            return self._cut(self.mode, rows)
        ways = ("padded", "packed", "tree") if self.dense else ("packed", "tree")
        chosen: list[Cut] = []
        least = float("inf")
        for way in ways:
            cuts = self._cut(way, rows)
            cost = sum(self._cost(cut) for cut in cuts)
            if cost < least * (_WORTH if way == "tree" else 1):
                chosen, least = cuts, cost
        return chosen

    def _cut(self, way: str, rows: Sequence[TokenSequence]) -> list[Cut]:
        if way == "padded":
            limit = self._share(sum(len(row.tokens) for row in rows))
            return padded(rows, limit, pass_tokens(cuda=not self.dense))
        blocks = not self.dense
        if way == "packed":
            return packed(rows, self.tokens, processes=self.processes, blocks=blocks)
        pair, edge = (self.pair * _DENSE_PAIR, DENSE_TOKENS) if self.dense else (0.0, self.tokens)
        edge = min(edge, self._share(unique_tokens(rows)))
        return shared(rows, self.tokens, TreeCost(pair), edge=edge, processes=self.processes, blocks=blocks)

    def _share(self, tokens: int) -> int:
        """The token limit, lowered so that every process gets a share of these tokens."""
        return self.tokens if self.processes == 1 else min(self.tokens, -(-tokens // self.processes))

    def _cost(self, cut: Cut) -> float:
        """Cost of a forward and backward pass, in units of a token's cost in the layers."""
        if not cut.flat:
            return float(PASS + cut.size * (1 + self.pair * cut.size / len(cut.trees) / 2))
        if not self.dense:
            return float(_GPU_PASS + cut.size + self.pair * sum(tree.depths for tree in cut.trees))
        pairs = sum(tree.size**2 * (0.5 if tree.chain else _DENSE_PAIR) for tree in cut.trees)
        return PASS + cut.size + self.pair * pairs + self.call * len(cut.trees)


def batch_layout(
    settings: ModelSettings,
    config: Any,
    *,
    cuda: bool,
    budget: TokenBudget | None = None,
    masks: bool = True,
    processes: int = 1,
) -> BatchLayout:
    """The layout for a model of this configuration within a token budget; `masks`: whether it accepts our attention.

    Raises ConfigError if the model does not support the setting `forward`.
    """
    text = config.get_text_config()
    reason = refusal(text) or (None if masks else "its attention cannot be replaced")
    if settings.forward in ("packed", "tree") and reason:
        raise ConfigError(f'model.forward = "{settings.forward}" cannot be used: {reason}; leave it out')
    hidden = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    layer = 4 * hidden**2 + 3 * hidden * inner
    return BatchLayout(
        mode="padded" if reason else settings.forward,
        tokens=budget.tokens if budget else settings.micro_batch_tokens or MOST_TOKENS,
        longest=budget.longest if budget else 2**62,
        pair=2 * hidden / layer,
        dense=not cuda,
        call=0.0 if cuda else _CALL / layer,
        processes=processes,
    )


def refusal(text: Any) -> str | None:
    """Why a model can only forward padded rows, if so: some layers would ignore the mask."""
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"the model has layers of type {', '.join(sorted(kinds))}"
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True) and not getattr(text, "layer_types", None):
        return f"the model's attention has a sliding window of {window} tokens"
    return None

"""Layout of rows in a forward pass: padded, packed end to end, or as prefix trees; the cheapest, unless it is set.

On a GPU rows are packed, or form trees if they share many tokens: flash or compiled flex attention computes only
visible pairs, and so does a CPU, where each row and each branch costs a separate call, which pays off if layers are wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainspan_schemas.config.settings import ModelSettings
from trainspan_schemas.errors import ConfigError
from trainspan_training.data.cuts import PASS, Cut, packed, padded, shared, unique_tokens
from trainspan_training.data.sequences import TokenSequence

__all__ = ["MOST_TOKENS", "RECOMPUTED", "BatchLayout", "TokenBudget", "batch_layout", "pass_tokens", "refusal"]

_CALL = 1.5e6
"""On a CPU a separate attention call for a row costs about as much as one token going through this many weights."""
RECOMPUTED = 4 / 3
"""Cost of a token whose activations are recomputed: one more forward pass, which is a third of forward and backward."""
_GPU_PASS = 2048
"""On a GPU a forward and backward pass has a fixed cost of about this many tokens, for launching kernels."""

MOST_TOKENS = 16384
"""Default number of tokens in a micro-batch, if memory has room for them."""


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
    tree: int
    """Greatest tree of one rollout's rows, if it is a micro-batch by itself: `tokens` times a power of two."""
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
    blocks: bool
    """Whether attention works on whole blocks, as on a GPU."""
    longest: int = 2**62
    """Longest row that memory has room for."""
    tree: int = 2**62
    """Greatest tree of one rollout's rows that memory has room for."""
    kept: int = 2**62
    """Greatest micro-batch whose activations are kept; those of a larger one are recomputed."""
    call: float = 0.0
    """Cost of a separate attention call, in units of a token's cost in the layers."""
    processes: int = 1
    padded_because: str | None = None
    """Why rows can only be padded, so that shared prefixes are forwarded again; None if they need not be."""

    def micro_batches(self, rows: Sequence[TokenSequence]) -> list[Cut]:
        """Micro-batches of one step's rows: of the ways that the mode allows, those after which the last process is done first."""
        every = ("packed", "tree") if self.blocks else ("padded", "packed", "tree")
        ways = every if self.mode == "auto" else (self.mode,)
        return min((cuts for way in ways for cuts in self._cuts(way, rows)), key=self._cost)

    def _cuts(self, way: str, rows: Sequence[TokenSequence]) -> list[list[Cut]]:
        """The micro-batches of one way; of trees that give every process a share, or that share all that memory allows."""
        if way == "padded":
            limit = self._share(sum(len(row.tokens) for row in rows))
            return [padded(rows, limit, pass_tokens(cuda=self.blocks))]
        if way == "packed":
            return [packed(rows, self.tokens, processes=self.processes, blocks=self.blocks)]
        limits = [(self.tokens, self.tokens), (self.tokens, self.tree)]
        if self.processes > 1:
            share = self._share(unique_tokens(rows))
            limits.insert(0, (share, share))
        limits = list(dict.fromkeys(limits))
        return [
            shared(rows, tokens, greatest=greatest, processes=self.processes, blocks=self.blocks)
            for tokens, greatest in limits
        ]

    def _share(self, tokens: int) -> int:
        """The token limit, lowered so that every process gets a share of these tokens."""
        return self.tokens if self.processes == 1 else min(self.tokens, -(-tokens // self.processes))

    def _cost(self, cuts: Sequence[Cut]) -> float:
        """Cost of a step's passes in the process that has most to do, in units of a token's cost in the layers."""
        return max(sum(self._cost_of(cut) for cut in cuts[rank :: self.processes]) for rank in range(self.processes))

    def _cost_of(self, cut: Cut) -> float:
        """Cost of a forward and backward pass."""
        if cut.flat:
            calls = sum(tree.calls for tree in cut.trees)
            attention = self.pair * sum(tree.depths for tree in cut.trees) + self.call * calls
        else:
            attention = self.pair * cut.size**2 / len(cut.trees) / 2
        return pass_tokens(cuda=self.blocks) + (cut.size + attention) * (RECOMPUTED if cut.size > self.kept else 1.0)


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
        pair=2 * hidden / layer,
        blocks=cuda,
        longest=budget.longest if budget else 2**62,
        tree=budget.tree if budget else 2**62,
        kept=budget.kept if budget else 2**62,
        call=0.0 if cuda else _CALL / layer,
        processes=processes,
        padded_because=reason,
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

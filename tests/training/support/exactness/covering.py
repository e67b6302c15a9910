"""Cases of the exactness test: each single change from the default, and an array covering every pair of values.

An option is supported only if loss and gradient equal the reference in every case.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainspan_schemas.config.settings import TrainSettings

__all__ = ["OPTIONS", "Case", "cases"]

OPTIONS: dict[str, tuple[Any, ...]] = {
    "weights": ("rollout", "token", "const"),
    "old": ("logged", "truncate", "mask", "none", "reject"),
    "ratio": ("token", "call"),
    "loss": ("clip", "cispo"),
    "layout": ("merged", "call", "packed", "tree"),
    "attention": ("trainspan", "sdpa"),
    "tokens": (16384, 60),
    "processes": (1, 2),
    "adapter": ("none", "lora"),
    "kl": (0.0, 0.1),
    "observations": (0.0, 0.3),
    "checkpointing": (False, True),
    "chunk": (2**26, 1000),
}
"""Option → its values, the default first."""


@dataclass(frozen=True, slots=True)
class Case:
    """One combination of options."""

    weights: str = "rollout"
    old: str = "logged"
    ratio: str = "token"
    loss: str = "clip"
    layout: str = "merged"
    attention: str = "trainspan"
    """The model's attention function: ours, or transformers' own, which gets dense masks."""
    tokens: int = 16384
    processes: int = 1
    adapter: str = "none"
    kl: float = 0.0
    observations: float = 0.0
    checkpointing: bool = False
    chunk: int = 2**26
    """Number of logits at a time."""

    @property
    def settings(self) -> TrainSettings:
        recompute = self.old != "logged"
        return TrainSettings(
            weights=self.weights,
            const_tokens=24 if self.weights == "const" else None,
            old_policy="recompute" if recompute else "logged",
            correction=None if not recompute else "none" if self.old == "reject" else self.old,
            correction_cap=1.5 if self.old in ("truncate", "mask") else None,
            reject_ratio=1.1 if self.old == "reject" else None,
            ratio=self.ratio,
            loss=self.loss,
            merge=self.layout != "call",
            forward=self.forward,
            micro_batch_tokens=self.tokens,
            adapter=self.adapter,
            lora_rank=4 if self.adapter == "lora" else None,
            kl_coef=self.kl,
            observation_weight=self.observations,
            gradient_checkpointing=self.checkpointing,
        )

    @property
    def forward(self) -> str:
        return self.layout if self.layout in ("packed", "tree") else "padded"

    def __str__(self) -> str:
        changed = [
            f"{name}={getattr(self, name)}" for name, values in OPTIONS.items() if getattr(self, name) != values[0]
        ]
        return ",".join(changed) or "default"


def cases(processes: int) -> list[Case]:
    """The default, every single change from it, and the covering array, for one process or for two."""
    singles = [Case(**{name: value}) for name, values in OPTIONS.items() for value in values]
    found = dict.fromkeys([*singles, *_pairwise()])
    return [case for case in found if case.processes == processes]


def _pairwise() -> list[Case]:
    """A greedy array with every pair of values of any two options; deterministic."""
    rng = np.random.default_rng(0)
    names = list(OPTIONS)
    missing = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(names, 2)
        for a in OPTIONS[one]
        for b in OPTIONS[two]
    }
    array = []
    while missing:
        drawn = [{name: values[rng.integers(len(values))] for name, values in OPTIONS.items()} for _ in range(60)]
        best = max(drawn, key=lambda row: len(missing & set(itertools.combinations(row.items(), 2))))
        missing -= set(itertools.combinations(best.items(), 2))
        array.append(Case(**best))
    return array

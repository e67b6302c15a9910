"""Whether the server really holds the weights it was given: its log-probabilities against the trainer's."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainspan_schemas.checkpoint import Canary, CanaryPrompt
from trainspan_serving.capture.caller import Caller
from trainspan_serving.capture.engine_tap import EngineTap, Exchange
from trainspan_serving.checkpoints.served_policy import Policy

__all__ = ["ABSENT", "CanaryReport", "Loaded", "judge", "prime", "read_through_cache", "score"]

FloatArray = NDArray[np.float64]

_EXACT = 1e-4
"""Greatest |Δ log-probability| of a token if server and trainer both compute in float32."""
_ROUNDING = 2e-5
"""Rounding that grows with the value: log-probabilities of -20 differed by up to 1.6e-4 in float32 on the same weights."""
_ROUGH = 0.2
"""Greatest mean |Δ log-probability| if one of them computes in bfloat16 or float16."""
_SHARP = 0.125
"""Standard error of the shift at which new and parent weights, 1 apart, are told from each other: 4 of them to the middle."""


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """The verdict: `fresh`, `stale`, `inconclusive` (nothing tells the new weights from their parent's) or `absent`."""

    status: Literal["fresh", "stale", "inconclusive", "absent"]
    evidence: str | None = None
    """What the verdict rests on, in one line."""
    dtype: str | None = None
    """The server's, e.g. "float32"."""
    mean_abs_diff: float | None = None
    """Mean |server − trainer| on the new weights."""
    max_abs_diff: float | None = None
    max_abs_change: float | None = None
    """Greatest |new − parent| by the trainer."""
    tolerance: float | None = None
    """What `max_abs_diff` (both in float32) or `mean_abs_diff` must keep within."""
    shift: float | None = None
    """Where the server stands from the parent's scores (0) to the new ones (1)."""
    shift_error: float | None = None
    """Its standard error."""
    cached_tokens: int | None = None
    """Tokens of a prompt that the server still took from its prefix cache, as computed by earlier weights."""
    tensors_equal: int | None = None
    """Tensors of the checkpoint that the server's kernels hold, compared entry by entry; None if that was not possible."""
    tensors_differing: int | None = None
    tensors_unknown: int | None = None
    """Those that could not be compared."""

    def as_json(self) -> dict[str, str | float | None]:
        """As the server answers it; JSON has no infinity, which stands for "not a number"."""
        values = asdict(self)
        return {key: None if value in (math.inf, -math.inf) else value for key, value in values.items()}


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many of a checkpoint's tensors the server's kernels hold."""

    equal: int
    differing: tuple[str, ...]
    unknown: int

    @property
    def whole(self) -> bool:
        return bool(self.equal) and not self.differing and not self.unknown


ABSENT = CanaryReport("absent")


async def prime(tap: EngineTap, canary: Canary, policy: Policy) -> None:
    """Has the weights in service compute a prompt of the canary, so that it lies in the prefix cache as theirs."""
    await read_through_cache(tap, canary, policy)


async def read_through_cache(tap: EngineTap, canary: Canary, policy: Policy) -> int:
    """Tokens of the canary's longest prompt that the server takes from its prefix cache, as for any client's request."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt = max(canary.prompts, key=lambda one: len(one.prompt_ids))
    output = await _generate(tap, prompt.prompt_ids, params, policy)
    return int(output.num_cached_tokens or 0)


async def score(tap: EngineTap, canary: Canary, policy: Policy) -> list[list[float]]:
    """Log-probabilities of each prompt's completion tokens by `policy`, at temperature 1; one list per prompt."""
    return list(await asyncio.gather(*(_score_prompt(tap, prompt, policy) for prompt in canary.prompts)))


async def _score_prompt(tap: EngineTap, prompt: CanaryPrompt, policy: Policy) -> list[float]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    # Prompt log-probabilities are those of the whole distribution, untouched by temperature.
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    output = await _generate(tap, [*prompt.prompt_ids, *prompt.completion_ids], params, policy)
    logprobs: Any = output.prompt_logprobs
    return [logprobs.logprobs[start] for start in logprobs.start_indices[len(prompt.prompt_ids) :]]


async def _generate(tap: EngineTap, tokens: list[int], params: Any, policy: Policy) -> Any:
    """The last output of a generation of our own."""
    from vllm.inputs.engine import tokens_input

    exchange = Exchange(Caller(None, None, None), "canary", policy, internal=True)
    last: Any = None
    with tap.exchange(exchange):
        outputs = tap.generate(tokens_input(tokens), params, f"trainspan-canary-{exchange.trace_id}")
    try:
        async for output in outputs:
            last = output
    finally:
        exchange.end_http(delivered=True)
    return last


def judge(
    canary: Canary,
    scores: Sequence[Sequence[float]],
    cached_tokens: int,
    loaded: Loaded | None,
    *,
    tolerance: float | None,
    dtype: str,
) -> CanaryReport:
    """Compares server and trainer. The server's cache and what its kernels hold are proof; scores are evidence.

    `tolerance` is the greatest mean |Δ|; without it float32 is held to `_EXACT` at every token. `dtype` is the
    server's (e.g. "float32"). `loaded` is None if the kernels cannot be read.
    """
    server = np.concatenate([np.asarray(one, dtype=np.float64) for one in scores])
    new, parent = (
        np.concatenate([np.asarray(getattr(prompt, name), dtype=np.float64) for prompt in canary.prompts])
        for name in ("logprobs_new", "logprobs_parent")
    )
    exact = tolerance is None and dtype == canary.dtype == "float32"
    limit = tolerance if tolerance is not None else _EXACT if exact else _ROUGH
    shift, error = _shift(server, new, parent)
    mean = _finite(np.abs(server - new).mean())
    figures = CanaryReport(
        "stale",
        dtype=dtype,
        mean_abs_diff=mean,
        max_abs_diff=_finite(np.abs(server - new).max()),
        max_abs_change=_finite(np.abs(new - parent).max()),
        tolerance=limit,
        shift=shift,
        shift_error=error,
        cached_tokens=cached_tokens,
        tensors_equal=loaded.equal if loaded else None,
        tensors_differing=len(loaded.differing) if loaded else None,
        tensors_unknown=loaded.unknown if loaded else None,
    )
    if exact:
        agrees, sharp, moved = _agree(server, new), not _agree(parent, new), True
        off = f"{figures.max_abs_diff:.3g} off the trainer's at a token (limit {limit:g})"
    else:
        agrees, sharp, moved = mean <= limit, error <= _SHARP, shift >= 0.5
        off = f"{mean:.3g} off the trainer's in the mean (limit {limit:g})"
    status: Literal["fresh", "stale", "inconclusive"] = "stale"
    if cached_tokens:
        evidence = f"{cached_tokens} tokens of a prompt were still cached from earlier weights"
    elif loaded and loaded.differing:
        count = len(loaded.differing)
        evidence = (
            f"the server does not compute with {count} of the checkpoint's tensors, first {loaded.differing[0]!r}"
        )
    elif not agrees:
        evidence = f"the server's log-probabilities are {off}"
    elif sharp and not moved:
        evidence = (
            f"the server's log-probabilities are nearer to the parent's (at {shift:.2f} ± {error:.2f} from 0 to 1)"
        )
    elif loaded and loaded.whole:
        status, evidence = "fresh", f"the server computes with all {loaded.equal} tensors of the checkpoint"
    elif not sharp:
        status, evidence = "inconclusive", "the new weights' log-probabilities hardly differ from their parent's"
    else:
        status, evidence = "fresh", f"the server's log-probabilities are the new ones (at {shift:.2f} from 0 to 1)"
    return replace(figures, status=status, evidence=evidence)


def _agree(scored: FloatArray, expected: FloatArray) -> bool:
    """True if each value is within `_EXACT` plus its rounding; never for a value that is not a number."""
    return bool((np.abs(scored - expected) <= _EXACT + _ROUNDING * np.abs(expected)).all())


def _shift(server: FloatArray, new: FloatArray, parent: FloatArray) -> tuple[float, float]:
    """λ of the least squares fit server − parent = λ (new − parent), and its standard error.

    The error is White's, which lets the noise differ from token to token: unlikely tokens have more of it. It is at least
    that of noise as wide as server − new, which holds also where the server's answers are the parent's to the bit.
    """
    change = new - parent
    power = float(change @ change)
    if not power > 0:
        return 0.0, math.inf
    shift = float((server - parent) @ change) / power
    residual = server - parent - shift * change
    white = math.sqrt(float((change * residual) @ (change * residual))) / power
    floor = math.sqrt(float(np.mean((server - new) ** 2)) / power)
    return _finite(shift), max(_finite(white), _finite(floor))


def _finite(value: float) -> float:
    """Infinite if it is not a number, so that it is within no limit."""
    return math.inf if math.isnan(value) else float(value)

"""Checks that the server really computes with the new weights: its log-probabilities against the trainer's."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainspan_schemas.artifacts.checkpoint import Canary, CanaryPrompt
from trainspan_serving.capture.caller import Caller
from trainspan_serving.capture.engine_tap import EngineTap, Exchange
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.swap.engine import Engine

__all__ = ["ABSENT", "CanaryReport", "Loaded", "cache_prompt", "judge", "prime", "read_through_cache", "score"]

FloatArray = NDArray[np.float64]

_EXACT = 1e-4
"""Maximum |Δ log-probability| of a token if server and trainer both compute in float32."""
_ROUNDING = 2e-5
"""Relative rounding: log-probabilities of -20 differed by up to 1.6e-4 in float32 on the same weights."""
_ROUGH = 0.2
"""Maximum mean |Δ log-probability| if one of them computes in bfloat16 or float16."""
_FIRST = -(2**63)
"""Priority in the engine, if it uses priorities: the highest that vLLM has."""
_SHARP = 0.125
"""Maximum standard error of the shift that distinguishes new from parent weights, 1 apart: the midpoint is 4 errors away."""


_Status: TypeAlias = Literal["fresh", "stale", "inconclusive", "absent"]


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """The verdict: `fresh`, `stale`, `inconclusive` (new and parent weights cannot be distinguished) or `absent`."""

    status: _Status
    evidence: str | None = None
    """The reason for the verdict, in one line."""
    dtype: str | None = None
    """The server's dtype, e.g. "float32"."""
    mean_abs_diff: float | None = None
    """Mean |server − trainer| on the new weights."""
    max_abs_diff: float | None = None
    max_abs_change: float | None = None
    """Maximum |new − parent| by the trainer."""
    tolerance: float | None = None
    """Limit of `max_abs_diff` (both in float32) or `mean_abs_diff`."""
    shift: float | None = None
    """Position of the server's scores between the parent's (0) and the new ones (1)."""
    shift_error: float | None = None
    """Its standard error."""
    cached_tokens: int | None = None
    """Prompt tokens that the server still took from its prefix cache, as computed by earlier weights."""
    tensors_equal: int | None = None
    """Checkpoint tensors that the server's kernels hold, compared entry by entry; None if they cannot be compared."""
    tensors_differing: int | None = None
    tensors_unknown: int | None = None
    """Tensors that could not be compared."""

    def as_json(self) -> dict[str, str | float | None]:
        """Returns the report for a response; infinity, which stands for NaN and which JSON lacks, becomes null."""
        values = asdict(self)
        return {key: None if value in (math.inf, -math.inf) else value for key, value in values.items()}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The comparison of a checkpoint's tensors with the server's kernels."""

    equal: int
    differing: tuple[str, ...]
    unknown: int

    @property
    def whole(self) -> bool:
        return bool(self.equal) and not self.differing and not self.unknown


ABSENT = CanaryReport("absent")


def cache_prompt(canary: Canary, engine: Engine) -> list[int]:
    """A prompt that fills one block of the prefix cache, if the context allows it.

    It has the canary's tokens backwards, so that it shares no prefix with a scored sequence, and again from the start if
    they are too few.
    """
    tokens = [token for prompt in canary.prompts for token in (*prompt.prompt_ids, *prompt.completion_ids)]
    return list(islice(cycle(reversed(tokens)), min(engine.cache_block_tokens + 1, engine.limits.max_tokens - 1)))


async def prime(tap: EngineTap, prompt: list[int], policy: ServedPolicy) -> None:
    """Computes a prompt with the weights in service, so that it is in the prefix cache."""
    await read_through_cache(tap, prompt, policy)


async def read_through_cache(tap: EngineTap, prompt: list[int], policy: ServedPolicy) -> int:
    """Returns how many tokens of the prompt come from the prefix cache, as in a client's request."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    output = await _generate(tap, prompt, params, policy)
    return int(output.num_cached_tokens or 0)


async def score(tap: EngineTap, canary: Canary, policy: ServedPolicy) -> list[list[float]]:
    """Returns one list per prompt: the completion tokens' log-probabilities under `policy` at temperature 1."""
    return list(await asyncio.gather(*(_score_prompt(tap, prompt, policy) for prompt in canary.prompts)))


async def _score_prompt(tap: EngineTap, prompt: CanaryPrompt, policy: ServedPolicy) -> list[float]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    # Prompt log-probabilities are of the full distribution; temperature does not affect them.
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


async def _generate(tap: EngineTap, tokens: list[int], params: Any, policy: ServedPolicy) -> Any:
    """Runs an internal generation and returns its last output."""
    from vllm.inputs.engine import tokens_input

    exchange = Exchange(Caller(None, None, None), "canary", policy, internal=True)
    last: Any = None
    with tap.exchange(exchange):
        request_id = f"trainspan-canary-{exchange.trace_id}"
        outputs = tap.generate(tokens_input(tokens), params, request_id, priority=_FIRST)
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
    """Compares server and trainer. The prefix cache and the kernels' contents are proof; scores are evidence.

    `tolerance` is the maximum mean |Δ|; without it, float32 must agree within `_EXACT` at every token. `dtype` is the
    server's (e.g. "float32"). `loaded` is None if the kernels cannot be read.
    """
    server = np.concatenate([np.asarray(prompt_scores, dtype=np.float64) for prompt_scores in scores])
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
        off = f"{mean:.3g} off the trainer's on average (limit {limit:g})"
    status, evidence = _verdict(figures, loaded, None if agrees else off, sharp=sharp, moved=moved)
    return replace(figures, status=status, evidence=evidence)


def _verdict(
    figures: CanaryReport, loaded: Loaded | None, off: str | None, *, sharp: bool, moved: bool
) -> tuple[_Status, str]:
    """The status and what shows it, proof before evidence.

    `off` says how far the scores are from the trainer's, None if they agree; `sharp`: new and parent can be told apart; `moved`: the
    scores are closer to the new ones.
    """
    at = f"at {figures.shift:.2f}"
    if figures.cached_tokens:
        return "stale", f"{figures.cached_tokens} tokens of a prompt were still cached from earlier weights"
    if loaded and loaded.differing:
        count, first = len(loaded.differing), loaded.differing[0]
        return "stale", f"the server does not compute with {count} of the checkpoint's tensors, first {first!r}"
    if off is not None:
        return "stale", f"the server's log-probabilities are {off}"
    if sharp and not moved:
        error = f"± {figures.shift_error:.2f} from 0 to 1"
        return "stale", f"the server's log-probabilities are closer to the parent's ({at} {error})"
    if loaded and loaded.whole:
        return "fresh", f"the server computes with all {loaded.equal} tensors of the checkpoint"
    if not sharp:
        return "inconclusive", "the new weights' log-probabilities hardly differ from their parent's"
    return "fresh", f"the server's log-probabilities are the new ones ({at} from 0 to 1)"


def _agree(scored: FloatArray, expected: FloatArray) -> bool:
    """Whether each value is within `_EXACT` plus its rounding; False for NaN."""
    return bool((np.abs(scored - expected) <= _EXACT + _ROUNDING * np.abs(expected)).all())


def _shift(server: FloatArray, new: FloatArray, parent: FloatArray) -> tuple[float, float]:
    """Returns λ of the least-squares fit server − parent = λ (new − parent), and its standard error.

    The error is White's, which allows the noise to differ between tokens: unlikely tokens are noisier. Its lower bound
    is the error from noise as large as server − new, in case the server's scores equal the parent's to the bit.
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
    """Turns NaN into infinity, so that it exceeds every limit."""
    return math.inf if math.isnan(value) else float(value)

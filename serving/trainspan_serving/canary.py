"""Whether the server really holds the weights it was given: its log-probabilities against the trainer's."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainspan_schemas.checkpoint import Canary, CanaryPrompt
from trainspan_schemas.errors import CheckpointError

from .caller import Caller
from .capture import EngineTap, Exchange
from .served import Policy

__all__ = ["ABSENT", "CanaryReport", "check_prompts", "judge", "prime", "read_through_cache", "score"]

_LOW_PRECISION_TOLERANCE = 0.05
"""Least tolerance where the server computes in bfloat16 or float16."""
_ROUNDING = 2e-5
"""Rounding that grows with the value: log-probabilities of -20 differed by up to 1.6e-4 in float32 on the same weights."""


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """The verdict: `fresh`, `stale`, `inconclusive` (the new weights hardly differ from their parent's) or `absent`."""

    status: Literal["fresh", "stale", "inconclusive", "absent"]
    max_abs_diff: float | None = None
    """Greatest |server − trainer| on the new weights."""
    max_abs_change: float | None = None
    """Greatest |new − parent| by the trainer."""
    tolerance: float | None = None
    cached_tokens: int | None = None
    """Tokens of a prompt that the server still took from its prefix cache, as computed by earlier weights."""

    def as_json(self) -> dict[str, str | float | None]:
        """As the server answers it; JSON has no infinity, which stands for "not a number"."""
        values = asdict(self)
        return {key: None if value in (math.inf, -math.inf) else value for key, value in values.items()}


ABSENT = CanaryReport("absent")


def check_prompts(canary: Canary, *, vocab_size: int, max_tokens: int) -> None:
    """Raises CheckpointError for a canary that this server cannot score."""
    if not canary.prompts:
        raise CheckpointError("canary.json has no prompts")
    for prompt in canary.prompts:
        tokens = [*prompt.prompt_ids, *prompt.completion_ids]
        scores = {len(prompt.completion_ids), len(prompt.logprobs_new), len(prompt.logprobs_parent)}
        if len(scores) != 1 or not prompt.prompt_ids or not prompt.completion_ids:
            raise CheckpointError("canary.json is malformed: its token and log-probability lists differ in length")
        if not all(0 <= token < vocab_size for token in tokens):
            raise CheckpointError(f"canary.json has a token outside the vocabulary of {vocab_size}")
        if len(tokens) >= max_tokens:
            raise CheckpointError(f"canary.json has a prompt of {len(tokens)} tokens; the server takes {max_tokens}")


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
    canary: Canary, scores: Sequence[Sequence[float]], cached_tokens: int, *, tolerance: float | None, dtype: str
) -> CanaryReport:
    """Compares server and trainer; a server that uses what earlier weights computed is stale whatever it scores.

    `tolerance` overrides the checkpoint's; `dtype` is the server's (e.g. "float32").
    """
    if tolerance is None:
        tolerance = canary.tolerance if dtype == "float32" else max(canary.tolerance, _LOW_PRECISION_TOLERANCE)
    pairs = [(scored, prompt.logprobs_new) for scored, prompt in zip(scores, canary.prompts, strict=True)]
    diff = max(_distance(scored, expected) for scored, expected in pairs)
    change = max(_distance(prompt.logprobs_new, prompt.logprobs_parent) for prompt in canary.prompts)
    if cached_tokens or not all(_agree(scored, expected, tolerance) for scored, expected in pairs):
        return CanaryReport("stale", diff, change, tolerance, cached_tokens)
    moved = any(not _agree(prompt.logprobs_parent, prompt.logprobs_new, tolerance) for prompt in canary.prompts)
    return CanaryReport("fresh" if moved else "inconclusive", diff, change, tolerance, cached_tokens)


def _agree(scored: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    """True if each value is within `tolerance` plus its rounding; never for a value that is not a number."""
    return all(abs(a - b) <= tolerance + _ROUNDING * abs(b) for a, b in zip(scored, expected, strict=True))


def _distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Greatest absolute difference; infinite where a value is not a number."""
    differences = [abs(a - b) for a, b in zip(left, right, strict=True)]
    return math.inf if any(math.isnan(value) for value in differences) else max(differences)

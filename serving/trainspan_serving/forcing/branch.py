"""One branch: which of its calls are answered with stored tokens, and whether it still follows the stored rollout."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainspan_schemas.telemetry.prefix import Branched, ForcedCall, ForcedChoice, ForcedPrefix, prompt_digest
from trainspan_schemas.telemetry.tokens import encode_ids
from trainspan_serving.forcing.divergence import DivergedError, describe_difference

__all__ = ["Branch", "ForcedAnswer"]


@dataclass(frozen=True, slots=True)
class ForcedAnswer:
    """The stored choices that answer one generation."""

    choices: tuple[ForcedChoice, ...]
    version: int | None
    """The policy version that sampled them."""


class Branch:
    """Matches the generations of one attempt at a rollout with the stored calls of its prefix.

    They are matched by their prompts, and in order if prompts are equal, so parallel agents may arrive in another order.
    A prompt without a match is sampled freely if it is that of a later stored call, with which the branch begins, and anything
    is after that. Otherwise the branch has diverged, for good: it would begin in another state.
    """

    def __init__(self, prefix: ForcedPrefix, text_of: Callable[[Sequence[int]], str]) -> None:
        """`text_of` decodes tokens, for messages."""
        self.prefix = prefix
        self._text_of = text_of
        self._open = [(call, list(call.choices)) for call in prefix.calls]
        """Stored calls with the choices that were not asked for yet."""
        self._forced = self._sampled = 0
        self._diverged: str | None = None

    def next_answer(self, prompt_ids: Sequence[int] | None, params: Any) -> ForcedAnswer | None:
        """Returns the stored answer of a generation (vLLM's parameters); None: it is sampled. Raises DivergedError."""
        if self._diverged is None:
            try:
                return self._next_answer(prompt_ids, params)
            except DivergedError as error:
                self._diverged = str(error)
        raise DivergedError(self._diverged)

    def _next_answer(self, prompt_ids: Sequence[int] | None, params: Any) -> ForcedAnswer | None:
        prompt = None if prompt_ids is None else encode_ids(prompt_ids)
        for index, (call, choices) in enumerate(self._open):
            if call.prompt == prompt:
                _check_answerable(call, len(choices), params)
                taken, choices[: params.n] = tuple(choices[: params.n]), []
                if not choices:
                    del self._open[index]
                self._forced += params.n
                return ForcedAnswer(taken, call.version)
        if not self._sampled and not self._is_later(prompt):
            calls = [call for call, _ in self._open] or [self._point]
            if prompt_ids is None:
                raise DivergedError(f"call {calls[0].index}: the prompt is not text")
            raise DivergedError(describe_difference(calls, prompt_ids, self._text_of))
        self._sampled += 1
        return None

    def _is_later(self, prompt: bytes | None) -> bool:
        """Whether the branch may begin here; if it is not known which calls came later, once all others are answered."""
        if not self._open and not self.prefix.later:
            return True
        return prompt is not None and prompt_digest(prompt) in self.prefix.later

    @property
    def _point(self) -> ForcedCall:
        """The call at which the branch begins; its answer is not known here."""
        calls = self.prefix.calls
        return ForcedCall(calls[-1].index + 1 if calls else 0, self.prefix.point, (), None)

    def own_seed(self, seed: int) -> int:
        """A seed for this attempt in place of the agent's: with one seed all branches from a state would sample the same."""
        text = f"{seed} {self.prefix.rollout_id} {self.prefix.attempt}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")

    def outcome(self) -> Branched:
        """What became of it so far."""
        missing = sum(len(choices) for _, choices in self._open)
        return Branched(self._forced, missing, self._sampled, self._diverged)


def _check_answerable(call: ForcedCall, left: int, params: Any) -> None:
    """Raises DivergedError if a request asks for more than what is stored."""
    if params.n > left:
        raise DivergedError(f"call {call.index}: {params.n} choices are asked for, {left} are stored")
    if params.prompt_logprobs is not None:
        raise DivergedError(f"call {call.index}: log-probabilities of prompts are not stored")
    if params.logprobs:
        raise DivergedError(
            f"call {call.index}: log-probabilities of other tokens than the sampled ones are not stored"
        )

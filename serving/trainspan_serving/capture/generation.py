"""One generation of the engine: what was asked of it, and per choice what it sampled."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trainspan_schemas import keys
from trainspan_schemas.tokens import encode_ids, encode_logprobs
from trainspan_serving.checkpoints.served_policy import Policy

__all__ = ["Choice", "Generation", "override_sampling", "with_logprobs"]

_OPERATIONS = {"/v1/completions": keys.OPERATION_TEXT_COMPLETION}


@dataclass(slots=True)
class Choice:
    """What the engine sampled for one choice so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(weights' label, first token, end token), in order; known when the choice is finished."""

    @property
    def finished(self) -> bool:
        return self.finish_reason not in (None, "abort", "error")


class Generation:
    """Gathers the outputs of one `generate` call."""

    def __init__(
        self, prompt: Any, params: Any, request_id: str, first_choice: int, policy: Policy, lora_request: Any
    ) -> None:
        """`lora_request`: an adapter that the client itself asked for, None for the policy."""
        self._params = params
        self._request_id = request_id
        self._first_choice = first_choice
        self._prompt_ids: list[int] = prompt.get("prompt_token_ids") or []
        self._multimodal = prompt.get("type") not in (None, "token")
        self._delta = params.output_kind.name == "DELTA"
        self._choices = [Choice() for _ in range(params.n)]
        self._policy = policy
        self.adapter: str | None = lora_request.lora_name if lora_request else None

    def add(self, output: Any) -> None:
        """Takes a `RequestOutput`; its lists belong to the engine and may grow later, so they are copied or re-read."""
        self._prompt_ids = output.prompt_token_ids or self._prompt_ids
        for completion in output.outputs:
            choice = self._choices[completion.index]
            if self._delta:
                choice.ids.extend(completion.token_ids)
                choice.logprobs.extend(_chosen_logprobs(completion))
            elif completion.finish_reason is not None:
                choice.ids = list(completion.token_ids)
                choice.logprobs = _chosen_logprobs(completion)
            if completion.finish_reason is not None:
                choice.finish_reason = completion.finish_reason
                choice.versions = [(span.version, span.start, span.end) for span in completion.weight_versions or ()]

    def choices(self, endpoint: str) -> Iterator[tuple[Choice, dict[str, Any]]]:
        """Each choice with its span attributes."""
        params = self._params
        shared: dict[str, Any] = {
            keys.GEN_AI_OPERATION: _OPERATIONS.get(endpoint, keys.OPERATION_CHAT),
            keys.GEN_AI_RESPONSE_ID: _response_id(self._request_id, endpoint),
            keys.GEN_AI_TEMPERATURE: float(params.temperature),
            keys.GEN_AI_TOP_P: float(params.top_p),
            keys.GEN_AI_TOP_K: int(params.top_k),
            keys.GEN_AI_MIN_P: float(params.min_p),
            keys.GEN_AI_FREQUENCY_PENALTY: float(params.frequency_penalty),
            keys.GEN_AI_PRESENCE_PENALTY: float(params.presence_penalty),
            keys.GEN_AI_REPETITION_PENALTY: float(params.repetition_penalty),
            keys.SAMPLING_CONSTRAINED: _is_constrained(params) or "-beam-" in self._request_id,
            keys.GEN_AI_INPUT_TOKENS: len(self._prompt_ids),
            keys.PROMPT_TOKEN_IDS: encode_ids(self._prompt_ids),
        }
        if params.seed is not None:
            shared[keys.GEN_AI_SEED] = int(params.seed)
        if params.max_tokens is not None:
            shared[keys.GEN_AI_MAX_TOKENS] = int(params.max_tokens)
        if self._multimodal:
            shared[keys.CALL_MULTIMODAL] = True
        if self.adapter is not None:
            shared[keys.POLICY_NAME] = self.adapter
        for index, choice in enumerate(self._choices):
            yield (
                choice,
                {
                    **shared,
                    **self._version_attributes(choice),
                    keys.CHOICE_INDEX: self._first_choice + index,
                    keys.GEN_AI_FINISH_REASONS: [choice.finish_reason or "abort"],
                    keys.GEN_AI_OUTPUT_TOKENS: len(choice.ids),
                    keys.COMPLETION_TOKEN_IDS: encode_ids(choice.ids),
                    keys.COMPLETION_LOGPROBS: encode_logprobs(choice.logprobs),
                },
            )

    def _version_attributes(self, choice: Choice) -> dict[str, Any]:
        """The engine's own labels where it reported them; they are those of the full weights, whatever adapter is on them."""
        version = self._policy.version
        if self._policy.adapter and self.adapter is None:
            return {keys.POLICY_VERSION: version}
        spans = [(int(label) if label.isdigit() else version, start, end) for label, start, end in choice.versions]
        attributes: dict[str, Any] = {keys.POLICY_VERSION: spans[-1][0] if spans else version}
        if len({label for label, _, _ in spans}) > 1:
            attributes[keys.POLICY_VERSION_SPANS] = json.dumps(spans)
        return attributes


def override_sampling(params: Any, temperature: float) -> Any:
    """A copy that samples from the policy's own distribution at `temperature`, nothing truncated or penalised."""
    return msgspec.structs.replace(
        params,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
    )


def with_logprobs(params: Any) -> Any:
    """A copy that also reports the chosen tokens' log-probabilities, in the form that costs least."""
    return msgspec.structs.replace(params, logprobs=0, flat_logprobs=True)


def _chosen_logprobs(completion: Any) -> list[float]:
    """Log-probability of each sampled token: the first entry of its position."""
    positions = completion.logprobs
    if positions is None:
        return []
    starts = getattr(positions, "start_indices", None)
    if starts is not None:
        return [positions.logprobs[start] for start in starts]
    return [position[token].logprob for position, token in zip(positions, completion.token_ids, strict=True)]


def _is_constrained(params: Any) -> bool:
    """Whether anything but temperature, top_p, top_k and min_p shaped the distribution that was sampled from."""
    return bool(
        params.structured_outputs is not None
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.min_tokens
        or params.thinking_token_budget is not None
        or params.trace_decode_token_ids
        or params.logprob_token_ids
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def _response_id(request_id: str, endpoint: str) -> str:
    """The id that the client got: completions number their prompts (`-0`), responses their turns (`_0`)."""
    separator = {"/v1/completions": "-", "/v1/responses": "_"}.get(endpoint)
    head, _, tail = request_id.rpartition(separator) if separator else ("", "", "")
    return head if head and tail.isdigit() else request_id

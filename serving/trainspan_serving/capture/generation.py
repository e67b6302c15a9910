"""One generation of the engine: its request, and the sampled tokens of each choice."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from trainspan_schemas.errors import one_line
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.constraints import Constraint
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs
from trainspan_serving.capture.constraints import EngineConstraints, is_constrained, kind_of
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.export.call_span import AttributeValue
from trainspan_serving.forcing.branch import ForcedAnswer

__all__ = ["Generation", "SampledChoice", "override_sampling", "with_logprobs"]

_log = logging.getLogger(__name__)

_OPERATIONS = {"/v1/completions": keys.OPERATION_TEXT_COMPLETION}


@dataclass(slots=True)
class SampledChoice:
    """The tokens sampled so far for one choice."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(weights' label, first token, end token), in order; known when the choice is finished."""

    @property
    def finished(self) -> bool:
        return self.finish_reason not in (None, "abort", "error")


class Generation:
    """Collects the outputs of one `generate` call."""

    def __init__(
        self,
        prompt: Any,
        params: Any,
        request_id: str,
        first_choice: int,
        policy: ServedPolicy,
        lora_request: Any,
        options: Mapping[str, Any],
    ) -> None:
        """`lora_request`: the adapter requested by the client, None for the policy; `options`: those of `generate`."""
        self._params = params
        self._asked_kind = kind_of(params)
        self._options = options
        self.final: Any = None
        """The parameters as they entered the engine; None until then."""
        self.accepted = False
        """Whether the engine has taken it; one that it refuses is no call."""
        self.forced: ForcedAnswer | None = None
        """The stored choices that answer it instead of the engine."""
        self._request_id = request_id
        self._first_choice = first_choice
        self._prompt_ids: list[int] = prompt.get("prompt_token_ids") or []
        self._multimodal = prompt.get("type") not in (None, "token")
        self._delta = params.output_kind.name == "DELTA"
        self._choices = [SampledChoice() for _ in range(params.n)]
        self._policy = policy
        self.adapter: str | None = lora_request.lora_name if lora_request else None

    def add(self, output: Any) -> None:
        """Adds a `RequestOutput`. The engine may extend its lists later, so they are copied or re-read."""
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

    def choices(
        self, endpoint: str, constraints: EngineConstraints
    ) -> Iterator[tuple[SampledChoice, dict[str, AttributeValue]]]:
        """Yields each choice with its span attributes."""
        params = self._params
        constraint = self._constraint(constraints)
        shared: dict[str, AttributeValue] = {
            keys.GEN_AI_OPERATION: _OPERATIONS.get(endpoint, keys.OPERATION_CHAT),
            keys.GEN_AI_RESPONSE_ID: _response_id(self._request_id, endpoint),
            keys.GEN_AI_TEMPERATURE: float(params.temperature),
            keys.GEN_AI_TOP_P: float(params.top_p),
            # As many tokens as there are, or more, are no truncation.
            keys.GEN_AI_TOP_K: int(params.top_k) if 0 < params.top_k < constraints.vocab_size else 0,
            keys.GEN_AI_MIN_P: float(params.min_p),
            keys.GEN_AI_FREQUENCY_PENALTY: float(params.frequency_penalty),
            keys.GEN_AI_PRESENCE_PENALTY: float(params.presence_penalty),
            keys.GEN_AI_REPETITION_PENALTY: float(params.repetition_penalty),
            keys.SAMPLING_CONSTRAINED: self._is_beam or is_constrained(params),
            keys.GEN_AI_INPUT_TOKENS: len(self._prompt_ids),
            keys.PROMPT_TOKEN_IDS: encode_ids(self._prompt_ids),
        }
        if params.seed is not None:
            shared[keys.GEN_AI_SEED] = int(params.seed)
        if params.max_tokens is not None:
            shared[keys.GEN_AI_MAX_TOKENS] = int(params.max_tokens)
        if self.forced is not None:
            shared[keys.CALL_FORCED] = True
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
                    **self._constraint_attributes(constraint, choice, constraints),
                    keys.CHOICE_INDEX: self._first_choice + index,
                    keys.GEN_AI_FINISH_REASONS: [choice.finish_reason or "abort"],
                    keys.GEN_AI_OUTPUT_TOKENS: len(choice.ids),
                    keys.COMPLETION_TOKEN_IDS: encode_ids(choice.ids),
                    keys.COMPLETION_LOGPROBS: encode_logprobs(choice.logprobs),
                },
            )

    def _constraint(self, constraints: EngineConstraints) -> Constraint | None:
        """Returns None if the generation was unconstrained or never reached the engine."""
        if self.final is None or not (is_constrained(self.final) or self._is_beam):
            return None
        try:
            constraint = constraints.read(self.final, self._asked_kind)
        except Exception as error:  # noqa: BLE001  # another vLLM's internals may differ: the call is still recorded
            _log.warning("cannot read the constraints of a call: %s", one_line(error))
            constraint = Constraint(others=("unreadable",))
        return replace(constraint, others=("beam_search", *constraint.others)) if self._is_beam else constraint

    @property
    def _is_beam(self) -> bool:
        return "-beam-" in self._request_id

    def _constraint_attributes(
        self, constraint: Constraint | None, choice: SampledChoice, constraints: EngineConstraints
    ) -> dict[str, AttributeValue]:
        if constraint is None:
            return {}
        try:
            start = constraints.start(self._prompt_ids, choice.ids, self.final, self._options)
        except Exception as error:  # noqa: BLE001  # as above
            _log.warning("cannot find the end of a call's reasoning: %s", one_line(error))
            start = None
        if start is None:
            constraint = replace(constraint, others=("reasoning", *constraint.others))
        record: dict[str, AttributeValue] = {keys.SAMPLING_CONSTRAINT: constraint.to_json()}
        return {**record, keys.CONSTRAINT_START: start} if start else record

    def _version_attributes(self, choice: SampledChoice) -> dict[str, AttributeValue]:
        """Uses the engine's own labels if it reported any; they name the full weights, whichever adapter is active.

        The version of a call with tokens of several ones is the oldest of them.
        """
        version = self._policy.version
        if self.forced is not None:
            return {} if self.forced.version is None else {keys.POLICY_VERSION: self.forced.version}
        if self._policy.adapter and self.adapter is None:
            return {keys.POLICY_VERSION: version}
        spans = [(int(label) if label.isdigit() else version, start, end) for label, start, end in choice.versions]
        attributes: dict[str, AttributeValue] = {
            keys.POLICY_VERSION: min((number for number, _, _ in spans), default=version)
        }
        if len({label for label, _, _ in spans}) > 1:
            attributes[keys.POLICY_VERSION_SPANS] = json.dumps(spans)
            attributes[keys.POLICY_SWAP_CACHE] = keys.CACHE_RECOMPUTED
        return attributes


def override_sampling(params: Any, temperature: float) -> Any:
    """Returns a copy that samples from the policy's distribution at `temperature`, without truncation or penalties.

    vLLM refuses several choices at temperature 0: they are sampled from the most probable token alone (top_k 1), and are
    recorded so.
    """
    is_greedy_set = temperature == 0 and params.n > 1
    return msgspec.structs.replace(
        params,
        temperature=1.0 if is_greedy_set else temperature,
        top_p=1.0,
        top_k=1 if is_greedy_set else 0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
    )


def with_logprobs(params: Any) -> Any:
    """Returns a copy that also requests the sampled tokens' log-probabilities, in the cheapest form.

    They come with those that the client asks for, be it the most probable tokens or tokens that it names.
    """
    has_them = params.logprobs is not None or params.logprob_token_ids
    return msgspec.structs.replace(params, **({} if has_them else {"logprobs": 0, "flat_logprobs": True}))


def _chosen_logprobs(completion: Any) -> list[float]:
    """Returns the log-probability of each sampled token: the first entry at its position."""
    positions = completion.logprobs
    if positions is None:
        return []
    starts = getattr(positions, "start_indices", None)
    if starts is not None:
        return [positions.logprobs[start] for start in starts]
    return [position[token].logprob for position, token in zip(positions, completion.token_ids, strict=True)]


def _response_id(request_id: str, endpoint: str) -> str:
    """Returns the id that the client got: completions number their prompts (`-0`), responses their turns (`_0`)."""
    separator = {"/v1/completions": "-", "/v1/responses": "_"}.get(endpoint)
    head, _, tail = request_id.rpartition(separator) if separator else ("", "", "")
    return head if head and tail.isdigit() else request_id

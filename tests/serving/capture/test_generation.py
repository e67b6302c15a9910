"""Recording a generation if vLLM's internal parameters have changed."""

from types import SimpleNamespace
from typing import Any

import pytest

from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.constraints import obstacle_of
from trainspan_serving.capture.generation import Generation
from trainspan_serving.checkpoints.served_policy import ServedPolicy

PARAMS: dict[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "top_k"), 0),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "seed", "max_tokens")),
    **dict.fromkeys(("thinking_token_budget", "trace_decode_token_ids", "logprob_token_ids")),
    "n": 1,
    "output_kind": SimpleNamespace(name="FINAL_ONLY"),
    "structured_outputs": SimpleNamespace(choice=None),
}


class Unknown:
    """The constraints of a vLLM with different internals."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = reads

    def read(self, *_: Any) -> Any:
        raise AttributeError("no such parameter")

    def start(self, *_: Any) -> int:
        if not self._reads:
            raise AttributeError("no such method")
        return 0


@pytest.mark.parametrize(("reads", "name"), [(True, "unreadable"), (False, "reasoning")])
def test_a_call_whose_constraint_cannot_be_read_is_still_recorded(reads: bool, name: str, tmp_path: Any) -> None:
    params = SimpleNamespace(**PARAMS)
    generation = Generation({"prompt_token_ids": [1]}, params, "id", 0, ServedPolicy("policy", 0, tmp_path), None, {})
    generation.final = params
    constraints: Any = Unknown(reads=reads)
    ((_, attributes),) = generation.choices("/v1/chat/completions", constraints)
    assert attributes[keys.SAMPLING_CONSTRAINED] is True
    assert obstacle_of(True, attributes[keys.SAMPLING_CONSTRAINT]) == f"constrained:{name}"

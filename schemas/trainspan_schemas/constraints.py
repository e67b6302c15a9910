"""Whether a generation request limits which tokens may come, beyond temperature and truncation, as OpenAI's API and vLLM know it."""

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["is_constrained"]

_CONSTRAINTS: Final = (
    *("logit_bias", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("allowed_token_ids", "bad_words", "min_tokens", "use_beam_search"),
)
_FREE_TOOL_CHOICES: Final = ("auto", "none")


def is_constrained(request: Mapping[str, Any]) -> bool:
    """Of the request's parameters by their names in the API; what has an unknown form counts as a constraint.

    `tool_choice` `required`, or one that names a tool, is a constraint; `response_format` of type `text` is none.
    """
    if any(request.get(name) for name in _CONSTRAINTS):
        return True
    if any((request.get(name) or "auto") not in _FREE_TOOL_CHOICES for name in ("tool_choice", "function_call")):
        return True
    form = request.get("response_format") or {"type": "text"}
    return not isinstance(form, Mapping) or form.get("type", "text") != "text"

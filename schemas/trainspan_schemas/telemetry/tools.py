"""What a call span says of tools: the results that its request brought, and offered tools that the prompt leaves out."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from trainspan_schemas.errors import InvalidRecordError

__all__ = ["TOOLS_ADVICE", "ToolResult", "lacks_tools", "results_from_json", "results_to_json", "tools_left_out"]

_MOST_CHARACTERS: Final = 16_384
_CUT: Final = "…"

TOOLS_ADVICE: Final = (
    "serve a model whose chat template has tools, or another template: `trainspan serve MODEL -- --chat-template FILE`"
)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a request says of a tool call of an earlier answer. Texts of more than 16,384 characters are cut, and end with `…`."""

    id: str
    """Of the call, as the policy server gave it."""
    name: str | None
    arguments: str | None
    """JSON, mostly."""
    result: str
    is_error: bool | None
    """None: the API has no word for it."""

    @classmethod
    def of(
        cls, id: str, name: str | None, arguments: str | None, result: str, *, is_error: bool | None
    ) -> "ToolResult":
        """The result with its texts cut."""
        return cls(id, name, None if arguments is None else _cut(arguments), _cut(result), is_error)


def results_to_json(results: Sequence[ToolResult]) -> str:
    """The text of the attribute CALL_TOOL_RESULTS."""
    return json.dumps([asdict(result) for result in results], ensure_ascii=False)


def results_from_json(text: str) -> list[ToolResult]:
    """Raises InvalidRecordError if the text is none of `results_to_json`."""
    try:
        records = json.loads(text)
        results = [ToolResult(**record) for record in (records if isinstance(records, list) else [records])]
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRecordError(f"no list of tool results: {error}") from error
    for one in results:
        texts = isinstance(one.id, str) and isinstance(one.result, str)
        optional = all(value is None or isinstance(value, str) for value in (one.name, one.arguments))
        if not (texts and optional and (one.is_error is None or isinstance(one.is_error, bool))):
            raise InvalidRecordError(f"no list of tool results: a value of {one.id!r:.80} has another type")
    return results


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + _CUT


def lacks_tools(tools: Iterable[Mapping[str, Any]], prompt: str) -> bool:
    """Whether a prompt names none of the `tools`, which have the form {"type": "function", "function": {"name": …}}."""
    names = [tool["function"]["name"] for tool in tools]
    return bool(names) and not any(name in prompt for name in names)


def tools_left_out(count: int) -> str:
    """What is wrong with such a request, in words."""
    return f"the request offers {count} tool{'' if count == 1 else 's'}, the prompt has none"

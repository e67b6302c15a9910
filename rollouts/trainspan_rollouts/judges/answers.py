"""Where a result has its answer, and the conversation that led to it.

An agent whose function returns `{"answer": …, "messages": […]}`, with the messages of a chat completion, returns both; the
answer may be left out, and is then the last message of the assistant. Any other value is the answer itself.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainspan_rollouts.judges.judge import Result

__all__ = ["answer_text", "code_of", "conversation", "final_answer", "json_text", "text_of"]

_FENCE: Final = "```"


def conversation(result: Result) -> list[Mapping[str, Any]] | None:
    """The messages that the agent returned; None if it returned none."""
    value = result.value
    messages = value.get("messages") if isinstance(value, Mapping) else None
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return None
    return [message for message in messages if isinstance(message, Mapping)]


def final_answer(result: Result) -> Any:
    """The answer: what a function returned, or the end of a command's output without outer white space."""
    if result.value is None:
        return result.stdout_tail.strip()
    messages = conversation(result)
    if messages is None:
        return result.value
    if "answer" in result.value:
        return result.value["answer"]
    return next((text_of(message) for message in reversed(messages) if message.get("role") == "assistant"), "")


def answer_text(result: Result) -> str:
    """The answer as text: JSON if it is none."""
    answer = final_answer(result)
    return answer if isinstance(answer, str) else json_text(answer)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, also of one in parts."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def code_of(text: str) -> str:
    """The last block of text between lines of three backticks; the whole text if there is none."""
    lines = text.split("\n")
    block: list[str] | None = None
    begin: int | None = None
    for number, line in enumerate(lines):
        if begin is None:
            is_fence = line.startswith(_FENCE) and "`" not in line[len(_FENCE) :]
            begin = number + 1 if is_fence else None
        elif line.rstrip(" \t") == _FENCE:
            block, begin = lines[begin:number], None
    return text if block is None else "".join(f"{line}\n" for line in block)


def json_text(value: Any) -> str:
    """The value as JSON in one line."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)

"""Conversations as tokens: what the policy server would get as prompt, and what the model would have to answer.

The prompt of an answer is what the chat template makes of the messages before it, as for a request. The answer is what
follows this prompt if the template renders the conversation with the answer, up to and including the token that ends it.
So the tokens in the loss are exact for any template, and need no `{% generation %}` in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.telemetry.tools import lacks_tools
from trainspan_training.sft.data.examples import Example, Message

__all__ = ["REASONS", "AnswerTokens", "Renderer", "dropped_lines", "read_template"]

REASONS: Final = {
    "no_answer": "no message of the assistant, or one that says nothing: give one with a text or a tool call as the completion",
    "no_prompt": "nothing comes before the answer",
    "refused_by_template": "the chat template raised an error",
    "template_rewrites": "the chat template renders an answer other than as a continuation of its prompt: "
    "set sft.chat_template_path to one that keeps prefixes",
    "not_rendered": "the chat template leaves out the answer's text, thoughts or a tool call: set sft.chat_template_path to one that "
    "renders them",
    "boundary": "the tokens of prompt and answer, one after the other, are not the text that the template renders",
    "no_end": "no token at which the server stops follows the answer: end the text with it, or set sft.chat_template_path",
    "stop_inside": "the answer contains a token at which the server would have stopped",
    "bad_arguments": "the arguments of a tool call are not a JSON object, which no server would render",
    "too_long": "prompt and answer exceed sft.max_length",
}
"""Why an answer is not trained, and what to do."""


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """One answer as tokens."""

    prompt: NDArray[np.int32]
    """(P,) not empty."""
    answer: NDArray[np.int32]
    """(A,) up to and including the token that ends it."""
    lacks_tools: bool = False
    """Whether tools are offered and the prompt names none of them."""

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.answer)


class Renderer:
    """Renders with a tokenizer and its chat template, or with another `template`; `stops` are the tokens that end an answer."""

    def __init__(self, tokenizer: Any, stops: frozenset[int], template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._template = template

    def calls(self, example: Example) -> list[AnswerTokens | str]:
        """The answers of an example, in order; the reason (see REASONS) in place of one that cannot be trained."""
        if example.text is not None:
            return [self._cut_at_end(*(self._encode(part) for part in example.text))]
        return [self._call(example, index) for index in example.answers] or ["no_answer"]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message]) -> NDArray[np.int32]:
        """(P,) the tokens of a request. Raises what the template raises."""
        return self._encode(self._text(messages, tools, is_open=True))

    def text_of(self, ids: Sequence[int]) -> str:
        return self._decode(np.array(ids, dtype=np.int32))

    def _call(self, example: Example, index: int) -> AnswerTokens | str:
        before, answer = [_as_history(message) for message in example.messages[:index]], example.messages[index]
        if not (answer["content"].strip() or answer.get("tool_calls") or answer.get("reasoning")):
            return "no_answer"
        if any(isinstance(call["function"]["arguments"], str) for call in answer.get("tool_calls", ())):
            return "bad_arguments"
        try:
            asked = self._text(before, example.tools, is_open=True)
            answered = self._text((*before, answer), example.tools, is_open=False)
        except Exception:  # noqa: BLE001  # templates raise anything
            return "refused_by_template"
        if not answered.startswith(asked):
            return "template_rewrites"
        if not _renders(answer, answered[len(asked) :]):
            return "not_rendered"
        prompt, whole = self._encode(asked), self._encode(answered)
        rest = whole[len(prompt) :]
        if not np.array_equal(whole[: len(prompt)], prompt):  # a token spans both: a server never sees it
            rest = self._encode(answered[len(asked) :])
            if self._decode(np.concatenate([prompt, rest])) != self._decode(whole):
                return "boundary"
        cut = self._cut_at_end(prompt, rest)
        return cut if isinstance(cut, str) else replace(cut, lacks_tools=lacks_tools(example.tools, asked))

    def _cut_at_end(self, prompt: NDArray[np.int32], rest: NDArray[np.int32]) -> AnswerTokens | str:
        """Removes what the template adds after the token that ends the answer: spaces, or the end of the text."""
        if not len(prompt):
            return "no_prompt"
        ends = np.isin(rest, list(self._stops))
        if not ends.any():
            return "no_end"
        size = int(ends.argmax()) + 1
        added = rest[size:][~ends[size:]]
        return "stop_inside" if self._decode(added).strip() else AnswerTokens(prompt, rest[:size])

    def _text(self, messages: Sequence[Message], tools: Sequence[Message], *, is_open: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            chat_template=self._template,
            add_generation_prompt=is_open,
            tokenize=False,
        )
        return text

    def _encode(self, text: str) -> NDArray[np.int32]:
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def _decode(self, ids: NDArray[np.int32]) -> str:
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _as_history(message: Message) -> Message:
    """A message before the answer: vLLM gives the template an empty object in place of arguments that are none."""
    if not (calls := message.get("tool_calls")):
        return message
    objects = [
        call["function"]["arguments"] if isinstance(call["function"]["arguments"], dict) else {} for call in calls
    ]
    as_served = [
        {**call, "function": {**call["function"], "arguments": arguments}}
        for call, arguments in zip(calls, objects, strict=True)
    ]
    return {**message, "tool_calls": as_served}


def _renders(answer: Message, text: str) -> bool:
    """Whether a rendered answer contains its text and thoughts (templates may change their spaces) and the names of its tool calls."""
    last = [*answer["content"].split()[-1:], *answer.get("reasoning", "").split()[-1:]]
    return all(word in text for word in (*last, *(call["function"]["name"] for call in answer.get("tool_calls", ()))))


def dropped_lines(dropped: Mapping[str, int], named: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A line for each reason: its count, examples, and what to do."""
    for reason, count in dropped.items():
        yield f"{reason} {count}, e.g. {', '.join(named.get(reason, ()))}: {REASONS[reason]}"


def read_template(path: str) -> str:
    """The chat template in a file. Raises ConfigError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"sft.chat_template_path = {path!r} cannot be read: {error}") from error

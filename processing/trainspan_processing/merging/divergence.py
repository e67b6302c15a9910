"""Finds the position where a prompt diverges from the previous call's tokens, and the cause, from text if possible.

Without a tokenizer, the cause is derived from the token ids alone (merging/merge_failures.py). With a tokenizer it may also be

- `reasoning`: the reasoning of an earlier answer was left out;
- `tool_call_ids`: the ids of tool calls differ;
- `arguments`: a tool call's JSON was rewritten with the same meaning and different text;

and `retokenization` means exactly that the text is the same and its tokens differ.
"""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trainspan_processing.merging.merge_failures import SHARED, SHOWN, Ids, cause_of
from trainspan_processing.text.token_text import Decoder

__all__ = ["EXPLANATIONS", "Divergence", "Explanation", "diverge"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explains one cause."""

    what: str
    advice: str


_TEMPLATE: Final = (
    "serve with a chat template that leaves earlier turns unchanged: `trainspan doctor` tries the served one, and "
    "examples/templates/chatml-tools.jinja is one for ChatML models with tools (`trainspan serve MODEL -- --chat-template FILE`)"
)

EXPLANATIONS: Final[Mapping[str, Explanation]] = {
    "fork": Explanation(
        "it starts from the same or an earlier state: best of n, a retry", "nothing: this is not a fault"
    ),
    "system_prompt": Explanation(
        "the first message changed, and the rest of the history is the same: the agent changed its system prompt, or sent another "
        "system message later, which the server merged into the first because the chat template takes none elsewhere",
        "let the agent send what changes in a later message; if the server merged it, put examples/templates/later-system-messages.jinja "
        "before the model's own template (`trainspan serve MODEL -- --chat-template FILE`)",
    ),
    "reasoning": Explanation("the reasoning of an earlier answer was left out of the history", _TEMPLATE),
    "tool_call_ids": Explanation(
        "the ids of tool calls in the history differ from those that the model wrote",
        "serve with a chat template that renders no ids, or have the agent send back the ids that it received",
    ),
    "arguments": Explanation(
        "the JSON of an earlier tool call was serialized again: same value, different text",
        "the server parses what the model wrote, and the template serializes it again: use a template that writes JSON as the "
        "model does (examples/templates/chatml-tools.jinja: one space after each comma and colon), and have the agent send arguments "
        "back as the text that it received",
    ),
    "retokenization": Explanation(
        "the text is the same, but the tokens differ: the model sampled a tokenization that the tokenizer does not produce",
        "no template helps: such calls are trained on their own tokens, but in a separate row",
    ),
    "template": Explanation("the history was rewritten: something was removed or inserted", _TEMPLATE),
    "other": Explanation(
        "the prompts have too little in common: a different conversation, or a compacted context",
        "nothing, if the agent does so on purpose",
    ),
}
"""Cause → what happened and what to do."""

_THOUGHTS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel|>analysis<|message|>", "<|end|>"))
"""Markers that open and close the reasoning in an answer."""
_ID: Final = re.compile(r"[A-Za-z0-9_.:-]*")
_SHORTEST_ID: Final = 6
_IN_STEP: Final = 6
"""Consecutive equal characters after which two texts count as aligned again."""
_FARTHEST: Final = 4_096
"""Characters before and after the difference that are searched for the value that contains it."""
_MOST_STARTS: Final = 48
"""Number of brackets before the difference, nearest first, that are tried as the start of that value."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """One prompt compared with the previous call. The excerpts are token ids, at most 24."""

    cause: str
    at: int
    """Position of the first token that differs."""
    shared: list[int]
    """Tokens before it, which both have."""
    was: list[int]
    """Tokens of the previous call from there on."""
    now: list[int]
    """Tokens of the prompt from there on."""


def diverge(before: tuple[Ids, Ids], prompt: Ids, decoder: Decoder | None) -> Divergence:
    """How `prompt` diverges from the call `before` (prompt, completion), which it does not continue."""
    cause, at = cause_of(before, prompt)
    earlier = np.concatenate(before)
    if decoder is not None and cause not in ("fork", "system_prompt"):
        # If they diverge within the answer, compare all of it: the differing value may begin earlier.
        start = min(at, len(before[0]))
        cause = _cause_in_text(decoder.text(earlier[start:].tolist()), decoder.text(prompt[start:].tolist()), cause)
    return Divergence(
        cause,
        at,
        earlier[max(0, at - SHARED) : at].tolist(),
        earlier[at : at + SHOWN].tolist(),
        prompt[at : at + SHOWN].tolist(),
    )


def _cause_in_text(was: str, now: str, of_tokens: str) -> str:
    """The cause found in two texts that begin at or before the difference; else `of_tokens`, the cause by token ids."""
    if now.startswith(was):
        return "retokenization"
    at = next((index for index, (old, new) in enumerate(zip(was, now, strict=False)) if old != new), None)
    if at is None:
        return of_tokens
    if _lost_a_thought(was, now, at):
        return "reasoning"
    if _ids_differ(was, now, at):
        return "tool_call_ids"
    if _is_reformatted(was, now, at):
        return "arguments"
    return "template" if of_tokens == "retokenization" else of_tokens


def _lost_a_thought(was: str, now: str, at: int) -> bool:
    """Whether the difference is in or at the start of reasoning that is gone, while the text that follows it remains."""
    for opens, closes in _THOUGHTS:
        start = was.find(
            opens, max(0, at - len(opens)), at + len(opens) + 1
        )  # the opening marker may share its first characters with the new text
        end = was.find(closes, at)
        # Without an opening marker in the text, the prompt may have opened the reasoning.
        if end < 0 or (start < 0 and opens in was[at:end]):
            continue
        thought = was[start + len(opens) : end] if start >= 0 else was[at:end]
        rest = was[end + len(closes) :].lstrip()[:_IN_STEP]
        if rest not in now[at - min(at, len(opens)) :]:
            continue
        if thought.strip():
            return thought.strip() not in now
        return closes not in now[at : at + len(opens) + len(thought) + len(closes)]
    return False


def _ids_differ(was: str, now: str, at: int) -> bool:
    """Whether the texts differ in one word that looks like an id, and are equal after it."""
    start = at
    while start and _ID.fullmatch(was[start - 1]):
        start -= 1
    words = [match[0] for text in (was, now) if (match := _ID.match(text, start))]
    if any(
        len(word) < _SHORTEST_ID or not re.search(r"[A-Za-z]", word) or not re.search(r"\d", word) for word in words
    ):
        return False
    after = [text[start + len(word) :][:_IN_STEP] for text, word in zip((was, now), words, strict=True)]
    return after[0] == after[1]


def _is_reformatted(was: str, now: str, at: int) -> bool:
    """Whether the difference is within a JSON value that both texts contain, written in two ways."""
    was, now = was[: at + _FARTHEST], now[: at + _FARTHEST]
    starts = [index for index in range(at, max(-1, at - _FARTHEST), -1) if was[index : index + 1] in ("{", "[", '"')]
    for start in reversed(starts[:_MOST_STARTS]):  # the outermost value first
        before, after = _value_at(was, start), _value_at(now, start)
        if before is not None and after is not None and before[1] > at:
            value = _plain(before[0])
            if isinstance(value, dict) and value == _plain(after[0]):
                return True
    return False


def _value_at(text: str, start: int) -> tuple[Any, int] | None:
    """(value, its end) of the JSON value or Python dict literal that begins at `start`; None if there is neither."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return _literal_at(text, start) if text[start : start + 1] == "{" else None
    return value, end


def _literal_at(text: str, start: int) -> tuple[Any, int] | None:
    """A complete dict as Python prints it, as written by templates that do not write JSON."""
    depth = 0
    for end in range(start, min(len(text), start + _FARTHEST)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth <= 0:
            break
    else:
        return None
    try:
        return ast.literal_eval(text[start : end + 1]), end + 1
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    """The value with JSON inside strings parsed too: arguments may be an object or its text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return _plain(json.loads(value))
        except (ValueError, RecursionError):
            return value
    return value

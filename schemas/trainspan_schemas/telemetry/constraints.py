"""Constraints on sampled tokens beyond temperature and truncation: how a request asks for one and how a call records it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainspan_schemas.errors import InvalidRecordError

__all__ = [
    "CONSTRAINED",
    "MAX_CHARACTERS",
    "REPLAYED_LIBRARY",
    "Constraint",
    "Grammar",
    "is_constrained",
    "obstacle_of",
]

CONSTRAINED: Final = "constrained"
"""The drop reason of a call whose constraint cannot be replayed; `constrained:NAME` names the constraint."""
REPLAYED_LIBRARY: Final = "xgrammar"
MAX_CHARACTERS: Final = 128 * 1024
"""Longest record of a constraint; a longer one is recorded as `too_large`."""
_KINDS: Final = ("json_schema", "json_object", "structural_tag", "regex", "choice", "grammar")
_LIBRARIES: Final = (REPLAYED_LIBRARY, "guidance", "outlines", "lm-format-enforcer", "unknown")
_OTHERS: Final = (
    *("beam_search", "forced_tokens", "logprob_token_ids", "min_tokens", "reasoning", "thinking_budget", "tokenizer"),
    *("too_large", "unreadable"),
)

_CONSTRAINTS: Final = (
    *("logit_bias", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("allowed_token_ids", "bad_words", "min_tokens", "use_beam_search"),
)
_FREE_TOOL_CHOICES: Final = ("auto", "none")


@dataclass(frozen=True, slots=True)
class Grammar:
    """The input of the engine's grammar library."""

    kind: str
    """`json_schema`, `json_object`, `structural_tag`, `regex`, `choice` or `grammar`: the effective kind of the request."""
    form: str
    """Format of `spec`: `json_schema`, `structural_tag`, `regex`, `ebnf`, `lark` or `choice`."""
    spec: str
    """The grammar as the library received it."""
    library: str
    """`xgrammar`, `guidance`, `outlines`, `lm-format-enforcer`, or `unknown`."""
    version: str
    """Version of the library."""
    vocab_size: int
    """Size of the model's vocabulary, and so of a mask in bits."""
    stop_ids: tuple[int, ...]
    """Tokens that may end the text once the grammar allows it, ascending."""
    any_whitespace: bool
    """Whether JSON may have whitespace between its tokens."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The constraint on the tokens of a call. All parts apply together."""

    grammar: Grammar | None = None
    allowed_ids: tuple[int, ...] | None = None
    """The only tokens allowed; None: all."""
    biases: tuple[tuple[int, float], ...] = ()
    """(token, bias added to its logit before the temperature), by token."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences whose last token is forbidden after the others; only the call's own tokens are matched."""
    others: tuple[str, ...] = ()
    """Names of other parameters that shaped the distribution and cannot be replayed; see the table in docs/processing.md."""

    def to_json(self) -> str:
        """The canonical text: equal constraints have equal texts. Empty parts are left out."""
        grammar = self.grammar
        record: dict[str, object] = {}
        if grammar:
            record["grammar"] = {name: getattr(grammar, name) for name in Grammar.__slots__}
        if self.allowed_ids is not None:
            record["allowed_token_ids"] = self.allowed_ids
        if self.biases:
            record["logit_bias"] = self.biases
        if self.bad_words:
            record["bad_words"] = self.bad_words
        if self.others:
            record["others"] = self.others
        return json.dumps(record, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Constraint":
        """Reads the output of `to_json`. Raises InvalidRecordError, also for unknown names: they become drop reasons."""
        if len(text) > 2 * MAX_CHARACTERS:
            raise InvalidRecordError(f"not a record of a constraint: {len(text)} characters")
        try:
            record = json.loads(text)
            grammar, allowed = record.get("grammar"), record.get("allowed_token_ids")
            return cls(
                grammar=None if grammar is None else _grammar(grammar),
                allowed_ids=None if allowed is None else _ids(allowed),
                biases=tuple((_id(token), _finite(bias)) for token, bias in record.get("logit_bias", ())),
                bad_words=tuple(_ids(word) for word in record.get("bad_words", ())),
                others=tuple(_known(name, _OTHERS) for name in record.get("others", ())),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRecordError(f"not a record of a constraint ({error!r}): {text[:80]!r}") from error

    @property
    def kinds(self) -> list[str]:
        """The names of its parts."""
        parts = {"allowed_token_ids": self.allowed_ids, "logit_bias": self.biases, "bad_words": self.bad_words}
        grammar = [self.grammar.kind] if self.grammar else []
        return [*grammar, *(name for name, part in parts.items() if part), *self.others]

    @property
    def obstacle(self) -> str | None:
        """The name of the first part that cannot be replayed; None if all of it can."""
        if self.others:
            return self.others[0]
        if self.grammar and self.grammar.library != REPLAYED_LIBRARY:
            return f"{self.grammar.library}_{self.grammar.kind}"
        return None


def obstacle_of(constrained: bool | None, record: str | None) -> str | None:
    """The reason to drop a call for its constraint; None if it is unconstrained or the constraint can be replayed.

    `constrained` is the call's own flag, `record` its constraint as `Constraint.to_json` wrote it.
    """
    if not constrained:
        return None
    if record is None:
        return CONSTRAINED
    try:
        name = Constraint.from_json(record).obstacle
    except InvalidRecordError:
        return CONSTRAINED
    return None if name is None else f"{CONSTRAINED}:{name}"


def is_constrained(request: Mapping[str, Any]) -> bool:
    """Whether a request's parameters, by their API names, constrain its tokens; an unknown form counts as a constraint.

    `tool_choice` `required`, or one that names a tool, is a constraint; `response_format` of type `text` is not.
    """
    if any(request.get(name) for name in _CONSTRAINTS):
        return True
    if any((request.get(name) or "auto") not in _FREE_TOOL_CHOICES for name in ("tool_choice", "function_call")):
        return True
    form = request.get("response_format") or {"type": "text"}
    return not isinstance(form, Mapping) or form.get("type", "text") != "text"


def _grammar(record: Mapping[str, Any]) -> Grammar:
    return Grammar(
        kind=_known(record["kind"], _KINDS),
        library=_known(record["library"], _LIBRARIES),
        **{name: str(record[name]) for name in ("form", "spec", "version")},
        vocab_size=_id(record["vocab_size"]),
        stop_ids=_ids(record["stop_ids"]),
        any_whitespace=bool(record["any_whitespace"]),
    )


def _known(name: Any, names: tuple[str, ...]) -> str:
    if name not in names:
        raise ValueError(f"unknown name {name!r}")
    return str(name)


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{value!r} is not a finite bias")
    return number


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(_id(value) for value in values)


def _id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{value!r} is not a token id")
    return value

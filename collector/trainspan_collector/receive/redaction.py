"""Removes what must not be stored before it reaches the journal: always secrets in headers and texts, and blocked keys.

A request is first searched for the bytes of the keys; only if it contains some is it processed and encoded again. Removed
blocked keys are listed in the attribute `trainspan.redacted` of the item they were on, so that the dataset can state why a
call is not trained on. Secrets are not part of a call: removing them leaves no such mark.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from trainspan_collector.otlp.byte_search import BytePatterns
from trainspan_schemas.telemetry import keys

__all__ = ["Redacted", "Redaction"]

_SECRET_KEY: Final = re.compile(
    r"^gen_ai\.(request\.)?headers$|(^|[._-])((proxy-)?authorization|(set-?)?cookie)$|api[_-]?key$|auth-?token$",
    re.IGNORECASE,
)
_KEY_END: Final = 32  # characters: whatever precedes them, the name of a secret is among these
_SECRET_BYTES: Final = BytePatterns(
    [
        rb"horization",
        rb"eaders\x12",  # the tag of KeyValue.value: the bytes before it end a key
        rb"cookie",
        rb"pi[-_ ]?key",
        rb"h-?token",
        rb"sk-[\w-]{20}",  # the byte before it may be a length, so it says nothing
        rb"://[^ \t\n\r\f\x0b/@:]*:[^ \t\n\r\f\x0b/@]+@",
    ]
)
"""A request with a secret contains one of these."""
_OPEN: Final = r"""(?:b?\\*+["'])"""
"""A quote, also one of Python's bytes, or escaped in a text in a text."""
_CLOSE: Final = r"""(?:\\*+["'])?+"""
_IS: Final = rf"""\s*+(?:,\s*+{_OPEN}value\\*+["']\s*+:|[:=])\s*+"""
"""Between a name and its value, also as in `{"name": …, "value": …}`."""
_OR_NEXT: Final = rf"(?:{_IS}|\s*+,\s*+)"
"""The same, or the next item of a list."""
_PAIR: Final = r"""[\w.-]++=[^\s;,"'\\]*+"""
_SECRET_TEXT: Final = re.compile(
    rf"""
    (
        (?:authorization|x-?api-?key|x-?auth-?token) {_CLOSE}{_IS}{_OPEN} \s*+ (?:(?:bearer|basic|token)\s++)?+
    ) [^"'\\\r\n]++
  | (authorization \s*+[:=]\s*+ (?:digest|aws4-hmac-sha256)\s++) [^\r\n]++
  | (
        authorization {_CLOSE}{_OR_NEXT}{_OPEN}?+ \s*+ (?:bearer|basic)\s++
      | x-?(?:api-?key|auth-?token) {_CLOSE}{_OR_NEXT}{_OPEN}?+
      | api[ ]key[ ]provided \s*+:\s*+ {_OPEN}?+
    ) (?![{{\[]) [^\s"'\\,}}\]]++
  | ((?:authorization|api[-_ ]?key) {_CLOSE}{_OR_NEXT}{_OPEN}?+ (?:token\s++)?+) (?=[a-z_.+~-]*+[0-9]) [\w.+/=~-]{{16,}}+
  | (cookie {_CLOSE}{_OR_NEXT}{_OPEN}?+) {_PAIR} (?:;\s?+{_PAIR})*+
  | (://[^\s/@:]*+:) [^\s/@]++ (?=@)
  | (?<![\w-]) sk- (?=[a-z_-]*+[0-9]) [\w-]{{20,}}+
    """,
    re.IGNORECASE | re.VERBOSE | re.ASCII,
)
"""Headers in texts, OpenAI's message about a wrong key, passwords in URLs, and what looks like a key: long, and with a digit.

In quotes, all that is in them is the value of `authorization`; without quotes and a scheme it must look like a key, as
prose speaks of the authorization too. It gives no character back, so that it takes a time in proportion to the text,
whatever a sender writes.
"""
_NAME_AND_VALUE: Final = ({"name", "value"}, {"key", "value"})
_REMOVED: Final = "[removed]"
_TEXT_WORDS: Final = ("uthorization", "pikey", "pi-key", "pi_key", "pi key", "cookie", "h-token", "htoken", "sk-", "@")
"""Parts, in lower case, of every text with a secret."""


@dataclass(frozen=True, slots=True)
class Redacted:
    """A request's bytes as they may be stored, and how much was removed."""

    body: bytes
    n_secrets: int = 0
    n_blocked: int = 0


class Redaction:
    """Removes secrets, and attributes with blocked keys; a blocked key that ends in `*` is a prefix."""

    def __init__(self, blocked_keys: Sequence[str] = ()) -> None:
        self._exact = frozenset(key for key in blocked_keys if not key.endswith("*"))
        self._prefixes = tuple(key[:-1] for key in blocked_keys if key.endswith("*"))
        self._bytes = BytePatterns((key.encode() for key in (*self._exact, *self._prefixes)), literal=True)

    def apply(self, request: Any, body: bytes) -> Redacted:
        """`body` without what must not be stored; `request` is the same, parsed (traces or logs), and may be changed."""
        if body not in self._bytes and body not in _SECRET_BYTES:
            return Redacted(body)
        removal = _Removal(self._is_blocked)
        for owner, parts, texts in _owners(request):
            removal.clean(owner, parts)
            for message, field in texts:
                removal.clean_text(message, field)
        if not removal.n_secrets and not removal.n_blocked:
            return Redacted(body)
        return Redacted(request.SerializeToString(), removal.n_secrets, removal.n_blocked)

    def _is_blocked(self, key: str) -> bool:
        return key in self._exact or (bool(self._prefixes) and key.startswith(self._prefixes))


class _Removal:
    """Removes attributes from messages, and secrets from their texts, and counts them."""

    def __init__(self, is_blocked: Callable[[str], bool]) -> None:
        self._is_blocked = is_blocked
        self._blocked: dict[str, None] = {}
        self.n_secrets = 0
        self.n_blocked = 0

    def clean(self, owner: Any, parts: Sequence[Any]) -> None:
        """Cleans the attribute lists and values of `owner`, and lists on it the blocked keys that it had."""
        self._blocked = {}
        for part in parts:
            if isinstance(part, AnyValue):
                self._clean_value(part)
            else:
                self._clean_pairs(part)
        if self._blocked:
            mark = owner.attributes.add(key=keys.REDACTED).value.array_value
            for key in self._blocked:
                mark.values.add(string_value=key)

    def clean_text(self, message: Any, field: str) -> None:
        """Replaces the secrets in a text of `message`."""
        text = getattr(message, field)
        lower = text.lower()
        if any(word in lower for word in _TEXT_WORDS):
            text, n_found = _SECRET_TEXT.subn(rf"\1\2\3\4\5\6{_REMOVED}", text)
            if n_found:
                setattr(message, field, text)
                self.n_secrets += n_found

    def _clean_pairs(self, pairs: Any) -> None:
        remaining = [pair for pair in pairs if not self._is_removed(pair.key)]
        for pair in remaining:
            self._clean_value(pair.value)
        if len(remaining) < len(pairs):  # all at once: each deletion moves everything after it
            del pairs[:]
            pairs.extend(remaining)

    def _is_removed(self, key: str) -> bool:
        """Whether an attribute is removed, which is then counted."""
        if self._is_blocked(key):
            self._blocked[key] = None
            self.n_blocked += 1
            return True
        if _names_secret(key):
            self.n_secrets += 1
            return True
        return False

    def _clean_value(self, value: AnyValue) -> None:
        kind = value.WhichOneof("value")
        if kind == "string_value":
            self.clean_text(value, "string_value")
        elif kind == "kvlist_value":
            pairs = value.kvlist_value.values
            self._clean_pairs(pairs)
            if len(pairs) == 2 and {pair.key for pair in pairs} in _NAME_AND_VALUE:
                self._clean_named(*(pair.value for pair in sorted(pairs, key=lambda pair: pair.key == "value")))
        elif kind == "array_value":
            items = value.array_value.values
            for item in items:
                self._clean_value(item)
            if len(items) == 2:
                self._clean_named(*items)

    def _clean_named(self, name: AnyValue, value: AnyValue) -> None:
        """Replaces the value of a header that is a pair."""
        if _names_secret(name.string_value) and value.WhichOneof("value") == "string_value":
            value.string_value = _REMOVED
            self.n_secrets += 1


def _names_secret(key: str) -> bool:
    return _SECRET_KEY.search(key, max(0, len(key) - _KEY_END)) is not None


def _owners(request: Any) -> Iterator[tuple[Any, list[Any], list[tuple[Any, str]]]]:
    """Everything that has attributes, with all its attribute lists and values, and its texts as messages and fields."""
    of_traces = hasattr(request, "resource_spans")
    for resource_items in request.resource_spans if of_traces else request.resource_logs:
        yield resource_items.resource, [resource_items.resource.attributes], []
        for scope_items in resource_items.scope_spans if of_traces else resource_items.scope_logs:
            yield scope_items.scope, [scope_items.scope.attributes], []
            if of_traces:
                for span in scope_items.spans:
                    within = [item.attributes for items in (span.events, span.links) for item in items]
                    events = [(event, "name") for event in span.events]
                    yield span, [span.attributes, *within], [(span, "name"), (span.status, "message"), *events]
            else:
                for record in scope_items.log_records:
                    yield record, [record.attributes, record.body], [(record, "event_name")]

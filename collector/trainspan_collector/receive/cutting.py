"""Cuts large OTLP requests into small ones, as bytes, which bounds what is parsed and what is loaded at a time.

A two-byte message takes a hundred times as much memory when parsed, so items are counted first. The three signals have the
same structure: field 1 of the request holds resource groups; in these, field 1 is the resource and field 2 holds scope groups;
in these, field 1 is the scope and field 2 holds spans, log records or metrics.
Wire format: https://protobuf.dev/programming-guides/encoding/.
"""

from collections.abc import Iterator
from typing import Final

from trainspan_collector.otlp.gunzip import TooLargeError
from trainspan_collector.otlp.signals import OtlpSignal
from trainspan_schemas.errors import InvalidRecordError

__all__ = ["SMALL_BYTES", "split_message"]

SMALL_BYTES: Final = 64 * 1024
"""Requests up to this size stay whole: however small their items, they take a few MiB."""
_PIECE_ITEMS: Final = 2048
_PIECE_BYTES: Final = 1024 * 1024
_PARTS_PER_ITEM: Final = 1_000_000
_ITEM_TAG: Final = 0x12  # field 2, length-delimited
_GROUP_TAG: Final = b"\x0a"
_SCOPE_TAG: Final = b"\x12"

_VALUE, _PAIR, _EVENT, _LINK, _LIST, _PAIRS, _SPAN, _RECORD, _METRIC, _RESOURCE, _SCOPE = range(11)
_INNER: Final[dict[int, dict[int, int]]] = {
    _RESOURCE: {1: _PAIR},
    _SCOPE: {3: _PAIR},
    _SPAN: {9: _PAIR, 11: _EVENT, 13: _LINK},
    _RECORD: {5: _VALUE, 6: _PAIR},
    _METRIC: {},  # not stored, and large ones are not parsed
    _EVENT: {3: _PAIR},
    _LINK: {4: _PAIR},
    _PAIR: {2: _VALUE},
    _VALUE: {5: _LIST, 6: _PAIRS},
    _LIST: {1: _VALUE},
    _PAIRS: {1: _PAIR},
}
"""Message → its repeated or nested fields that are messages."""
_ITEMS: Final = {"traces": _SPAN, "logs": _RECORD, "metrics": _METRIC}
_DELIMITED: Final = 2


def split_message(signal: OtlpSignal, body: bytes, max_items: int) -> Iterator[bytes]:
    """Requests that together contain what `body` does, in order, each with at most about a MiB and 2,048 items.

    A larger item gets its own request. Raises InvalidRecordError if the bytes are not such a request, TooLargeError for more
    than `max_items` spans, log records, metrics, groups or other fields next to them, or an item of more than a million parts.
    """
    if len(body) <= SMALL_BYTES:
        yield body
        return
    if len(body) <= _PIECE_BYTES and _Cutter(body, _ITEMS[signal.name], max_items).count() <= _PIECE_ITEMS:
        yield body
    else:
        yield from _Cutter(body, _ITEMS[signal.name], max_items).pieces()


class _Cutter:
    def __init__(self, body: bytes, item: int, max_items: int) -> None:
        self._body = body
        self._item = item
        self._max_items = max_items
        self._n_items = 0
        self._most_bytes = 2 * len(body) + 4 * _PIECE_BYTES
        self._n_bytes = 0
        self._groups: list[bytes] = []
        """Resource groups of the current piece."""
        self._size = 0
        self._count = 0

    def count(self) -> int:
        """The number of items and groups."""
        for number, _, first, end in _fields(self._body, 0, len(self._body)):
            if number != 1:
                self._count_item()
            else:
                for scope_start, scope_end in self._resource_head(first, end)[1]:
                    self._scope_group(scope_start, scope_end)
        return self._n_items

    def pieces(self) -> Iterator[bytes]:
        for number, start, first, end in _fields(self._body, 0, len(self._body)):
            if number == 1:
                yield from self._resource_group(first, end)
            else:
                self._count_item()
                self._groups.append(self._body[start:end])
        if self._groups:
            yield self._take()

    def _resource_group(self, start: int, end: int) -> Iterator[bytes]:
        head, scopes = self._resource_head(start, end)
        done: list[bytes] = []
        """Scope groups of this resource in the current piece."""
        for scope_start, scope_end in scopes:
            scope_head, items = self._scope_group(scope_start, scope_end)
            run: list[bytes] = []
            for item_start, item_end in items:
                n_bytes = item_end - item_start
                if self._count and (self._count >= _PIECE_ITEMS or self._size + n_bytes > _PIECE_BYTES):
                    if run:
                        done.append(_field(_SCOPE_TAG, scope_head + b"".join(run)))
                    if done:
                        self._groups.append(_field(_GROUP_TAG, head + b"".join(done)))
                    yield self._take()
                    run, done = [], []
                    self._size = len(head) + len(scope_head)
                run.append(self._body[item_start:item_end])
                self._count += 1
                self._size += n_bytes
            done.append(_field(_SCOPE_TAG, scope_head + b"".join(run)))
            self._count += 1
            self._size += len(scope_head)
        self._groups.append(_field(_GROUP_TAG, head + b"".join(done)))
        self._size += len(head)
        self._count += 1

    def _take(self) -> bytes:
        piece = b"".join(self._groups)
        self._groups, self._size, self._count = [], 0, 0
        self._n_bytes += len(piece)
        if self._n_bytes > self._most_bytes:
            raise TooLargeError(
                "the request's resources and scopes are too large to split the request: send smaller ones"
            )
        return piece

    def _resource_head(self, start: int, end: int) -> tuple[bytes, list[tuple[int, int]]]:
        """A resource group's own fields, and where its scope groups are."""
        self._count_item()
        head, scopes = _OwnFields(self._body, _RESOURCE), []
        for number, field_start, first, field_end in _fields(self._body, start, end):
            self._count_item()
            if number == 2:
                scopes.append((first, field_end))
            else:
                head.add(number, field_start, first, field_end)
        return head.joined(), scopes

    def _scope_group(self, start: int, end: int) -> tuple[bytes, list[tuple[int, int]]]:
        """A scope group's own fields, and where the field of each item begins and ends."""
        body = self._body
        head, items = _OwnFields(body, _SCOPE), []
        position = start
        while position < end:
            if body[position] != _ITEM_TAG:
                number, field_start, first, position = _field_at(body, position, end)
                if number == 2:
                    raise _invalid(body)  # no encoder writes the tag in more than one byte, or this field as a number
                self._count_item()
                head.add(number, field_start, first, position)
                continue
            field_start = position  # without a call for each: most requests hold nothing else
            position += 1
            length, shift = 0, 0
            while True:
                if position >= end or shift > 28:
                    raise _invalid(body)
                octet = body[position]
                position += 1
                length |= (octet & 0x7F) << shift
                if octet < 0x80:
                    break
                shift += 7
            position += length
            if position > end:
                raise _invalid(body)
            self._count_item()
            if length > _PIECE_BYTES:
                _check_parts(body, position - length, position, self._item)
            items.append((field_start, position))
        return head.joined(), items

    def _count_item(self) -> None:
        self._n_items += 1
        if self._n_items > self._max_items:
            raise TooLargeError(
                f"the request has more than {self._max_items} spans, log records or metrics: send smaller batches, "
                "or raise max_request_items"
            )


class _OwnFields:
    """A group's fields other than its members: one resource or scope, which may be split over fields that are merged."""

    def __init__(self, body: bytes, kind: int) -> None:
        self._body, self._kind = body, kind
        self._parts: list[bytes] = []
        self._heads: list[tuple[int, int]] = []

    def add(self, number: int, start: int, first: int, end: int) -> None:
        self._parts.append(self._body[start:end])
        if number == 1:
            self._heads.append((first, end))

    def joined(self) -> bytes:
        """Raises TooLargeError for a resource or scope with too many parts."""
        if sum(end - start for start, end in self._heads) > _PIECE_BYTES:
            head = b"".join(self._body[start:end] for start, end in self._heads)
            _check_parts(head, 0, len(head), self._kind)
        return b"".join(self._parts)


def _check_parts(body: bytes, start: int, end: int, kind: int) -> None:
    """Raises TooLargeError for a message with too many parts, nested ones included."""
    n_parts = 0
    to_do = [(start, end, kind)]
    while to_do:
        start, end, kind = to_do.pop()
        inner = _INNER[kind]
        for number, field_start, first, field_end in _fields(body, start, end):
            if number in inner and body[field_start] & 7 == _DELIMITED:
                to_do.append((first, field_end, inner[number]))
            n_parts += 1
            if n_parts > _PARTS_PER_ITEM:
                raise TooLargeError(f"a span or log record has more than {_PARTS_PER_ITEM} parts: send smaller ones")


def _fields(body: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The number, start, start of the value, and end of each field."""
    position = start
    while position < end:
        field = _field_at(body, position, end)
        yield field
        position = field[3]


def _field_at(body: bytes, start: int, end: int) -> tuple[int, int, int, int]:
    tag, position = _varint(body, start, end)
    wire_type = tag & 7
    if wire_type == 0:
        first = position
        _, position = _varint(body, position, end)
    elif wire_type == 2:
        length, first = _varint(body, position, end)
        position = first + length
    elif wire_type in (1, 5):
        first, position = position, position + (8 if wire_type == 1 else 4)
    else:
        raise _invalid(body)
    if position > end:
        raise _invalid(body)
    return tag >> 3, start, first, position


def _varint(body: bytes, position: int, end: int) -> tuple[int, int]:
    number, shift = 0, 0
    while position < end and shift < 70:
        octet = body[position]
        position += 1
        number |= (octet & 0x7F) << shift
        if octet < 0x80:
            return number, position
        shift += 7
    raise _invalid(body)


def _field(tag: bytes, value: bytes) -> bytes:
    length, octets = len(value), bytearray()
    while length >= 0x80:
        octets.append(length & 0x7F | 0x80)
        length >>= 7
    octets.append(length)
    return b"".join((tag, octets, value))


def _invalid(body: bytes) -> InvalidRecordError:
    return InvalidRecordError(f"the body of {len(body)} bytes is not an OTLP request in protobuf")

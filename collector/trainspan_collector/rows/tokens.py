"""Token columns: packed bytes, integer or double arrays and JSON strings → arrays, without a Python loop over tokens."""

import json
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from trainspan_schemas.errors import InvalidRecordError

__all__ = ["pack_ids", "pack_logprobs", "packed_lists"]

_MAX_ID: Final = 2**31 - 1


def pack_ids(value: AnyValue) -> bytes:
    """Token ids (T,) as int32 little-endian bytes (4·T,). Raises InvalidRecordError if they are malformed."""
    kind = value.WhichOneof("value")
    if kind == "bytes_value":
        return _whole(value.bytes_value)
    if kind == "array_value":
        fast = _fast_ids(value.array_value.SerializeToString())
        if fast is not None:
            return fast
        return _ids([_number(item, ("int_value",)) for item in value.array_value.values])
    if kind == "string_value":
        return _ids(_from_text(value.string_value, (int,)))
    raise InvalidRecordError(f"token ids are of type {kind}: send bytes (int32 little-endian)")


def pack_logprobs(value: AnyValue) -> bytes:
    """Log-probabilities (T,) as float32 little-endian bytes (4·T,). Raises InvalidRecordError if they are malformed."""
    kind = value.WhichOneof("value")
    if kind == "bytes_value":
        return _whole(value.bytes_value)
    if kind == "array_value":
        fast = _fast_doubles(value.array_value.SerializeToString())
        if fast is not None:
            return fast
        return _floats([_number(item, ("double_value", "int_value")) for item in value.array_value.values])
    if kind == "string_value":
        return _floats(_from_text(value.string_value, (float, int)))
    raise InvalidRecordError(f"log-probabilities are of type {kind}: send bytes (float32 little-endian)")


def packed_lists(packed: Sequence[bytes | None], item: pa.DataType) -> pa.Array:
    """A list column (B,) of 4-byte items from each row's packed bytes; None is NULL."""
    lengths = np.fromiter((len(row) // 4 if row is not None else 0 for row in packed), np.int64, len(packed))
    offsets = np.zeros(len(packed) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    values = b"".join(row for row in packed if row is not None)
    valid = np.packbits(np.fromiter((row is not None for row in packed), bool, len(packed)), bitorder="little")
    items = pa.Array.from_buffers(item, len(values) // 4, [None, pa.py_buffer(values)])
    return pa.Array.from_buffers(
        pa.list_(item), len(packed), [pa.py_buffer(valid), pa.py_buffer(offsets)], children=[items]
    )


def _whole(data: bytes) -> bytes:
    if len(data) % 4:
        raise InvalidRecordError(f"packed token attribute has {len(data)} bytes, not a multiple of 4")
    return data


def _number(item: AnyValue, kinds: tuple[str, ...]) -> float:
    kind = item.WhichOneof("value")
    if kind not in kinds:
        raise InvalidRecordError(f"token array holds a {kind}")
    number: float = getattr(item, kind)
    return number


def _from_text(text: str, kinds: tuple[type, ...]) -> list[float]:
    try:
        numbers = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(f"token attribute is text but not a JSON array: {text[:40]!r}") from error
    if not isinstance(numbers, list) or any(type(number) not in kinds for number in numbers):
        raise InvalidRecordError(f"token attribute is not a JSON array of numbers: {text[:40]!r}")
    return numbers


def _ids(numbers: Sequence[float]) -> bytes:
    if any(not -_MAX_ID <= number <= _MAX_ID for number in numbers):
        raise InvalidRecordError(f"a token id over {_MAX_ID}")
    return np.asarray(numbers, "<i4").tobytes()


def _floats(numbers: Sequence[float]) -> bytes:
    try:
        return np.asarray(numbers, "<f4").tobytes()
    except OverflowError as error:
        raise InvalidRecordError("a log-probability is an integer too large for a float") from error


def _fast_ids(data: bytes) -> bytes | None:
    """Ids of a serialized ArrayValue whose items are all non-negative integers below 2³¹; None for anything else.

    An item is `0a LEN 18 VARINT`. Exactly four of its bytes have the high bit clear: those three and the varint's last.
    """
    octets = np.frombuffer(data, np.uint8)
    clear = np.flatnonzero(octets < 0x80)
    if clear.size % 4:
        return None
    tag, length, kind, last = clear.reshape(-1, 4).T
    width = last - kind
    regular = (
        (octets[tag] == 0x0A)
        & (octets[kind] == 0x18)
        & (length == tag + 1)
        & (kind == tag + 2)
        & (octets[length] == width + 1)
        & (width <= 5)
    )
    if not regular.all() or (tag.size and (tag[0] != 0 or (tag[1:] != last[:-1] + 1).any())):
        return None
    ids: npt.NDArray[np.int64] = np.zeros(tag.size, np.int64)
    for index in range(5):
        present = width > index
        ids[present] |= (octets[kind[present] + 1 + index].astype(np.int64) & 0x7F) << (7 * index)
    if ids.size and ids.max() > _MAX_ID:
        return None
    return ids.astype("<i4").tobytes()


def _fast_doubles(data: bytes) -> bytes | None:
    """Numbers of a serialized ArrayValue whose items are all doubles (`0a 09 21` and 8 bytes); None for anything else."""
    octets = np.frombuffer(data, np.uint8)
    if octets.size % 11:
        return None
    items = octets.reshape(-1, 11)
    if (items[:, :3] != (0x0A, 0x09, 0x21)).any():
        return None
    return np.ascontiguousarray(items[:, 3:]).view("<f8").ravel().astype("<f4").tobytes()

"""Arrow Flight's messages: https://arrow.apache.org/docs/format/Flight.html. Only what DoGet and DoAction need.

A FlightData is encoded by hand, since its body, field 1000, is large: one copy instead of three.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto

__all__ = ["SERVICE", "Action", "Result", "Ticket", "flight_data", "parts_of"]

SERVICE: Final = "arrow.flight.protocol.FlightService"
_HEADER_TAG: Final = b"\x12"  # field 2, bytes: the metadata of an IPC message
_PART_BYTES: Final = 512 * 1024
_PART_ROWS: Final = 2048
_BODY_TAG: Final = b"\xc2\x3e"  # field 1000, bytes: its body


def parts_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows in batches of at most about half a MiB and 2,048 rows, or of a single larger row.

    Memory of that size is reused, but each larger block is new to the process.
    """
    pending: list[pa.RecordBatch] = []
    n_bytes = n_rows = 0
    for batch in batches:
        if pending and (n_bytes + batch.nbytes > _PART_BYTES or n_rows + batch.num_rows > _PART_ROWS):
            yield _joined(pending)
            pending, n_bytes, n_rows = [], 0, 0
        if batch.nbytes > _PART_BYTES or batch.num_rows >= _PART_ROWS:
            yield from _cut(batch)
        elif batch.num_rows:
            pending.append(batch)
            n_bytes, n_rows = n_bytes + batch.nbytes, n_rows + batch.num_rows
    if pending:
        yield _joined(pending)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    [joined] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    n_parts = -(-batch.nbytes // _PART_BYTES)
    n_rows = max(1, -(-batch.num_rows // max(1, n_parts)))
    for start in range(0, batch.num_rows, n_rows):
        yield batch.slice(start, n_rows)


def flight_data(message: pa.ipc.Message) -> bytes:
    """An IPC message (a schema, a dictionary, a record batch) as a serialized FlightData."""
    header, body = message.metadata, message.body
    parts = [_HEADER_TAG, _varint(header.size), header]
    if body is not None and body.size:
        parts += [_BODY_TAG, _varint(body.size), body]
    return b"".join(parts)


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)


def _messages(package: str, **fields: Mapping[str, Any]) -> list[Any]:
    """Message classes: name → field → type, numbered from 1."""
    file = descriptor_pb2.FileDescriptorProto(name="trainspan/flight.proto", package=package, syntax="proto3")
    for name, members in fields.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(members.items(), 1):
            message.field.add(name=field, number=number, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in fields]


_TEXT, _BYTES = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BYTES
Ticket, Action, Result = _messages(
    "arrow.flight.protocol", Ticket={"ticket": _BYTES}, Action={"type": _TEXT, "body": _BYTES}, Result={"body": _BYTES}
)

"""Files as records: lines or documents of JSON, or OTLP in protobuf, each of which may be compressed with gzip or zstd."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from trainspan_importers.json_documents import document_records
from trainspan_schemas.errors import InvalidRecordError, UsageError
from trainspan_schemas.telemetry.utf8 import well_formed

__all__ = ["MOST_BYTES", "Broken", "Record", "SourceFile", "files_of"]

MOST_BYTES: Final = 64 * 1024 * 1024
"""Of a record; a longer one is left out."""
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_CHUNK: Final = 1024 * 1024
_HEAD_RECORDS: Final = 5


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON value, or the bytes of one message in protobuf."""

    line: int
    """From 1; of a message in protobuf its number."""
    value: Any


@dataclass(frozen=True, slots=True)
class Broken:
    """What cannot be read as a record."""

    line: int
    why: str


def files_of(sources: Sequence[Path]) -> list[tuple[Path, bool]]:
    """The files, with whether they were named themselves; a folder means all files in it. Raises UsageError."""
    files: list[tuple[Path, bool]] = []
    for source in sources:
        if source.is_dir():
            inner = sorted(path for path in source.rglob("*") if path.is_file() and not _is_hidden(path, source))
            files += [(path, False) for path in inner]
        elif source.is_file():
            files.append((source, True))
        else:
            raise UsageError(f"{source}: no such file or folder")
    if not files:
        raise UsageError(f"{', '.join(map(str, sources))}: no file in it")
    return files


def _is_hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


class SourceFile:
    """One file. `on_bytes` is called with the number of the file's own bytes that were read."""

    def __init__(self, path: Path, on_bytes: Callable[[int], None] = lambda _n: None) -> None:
        self.path = path
        self._on_bytes = on_bytes

    def head(self) -> list[Any]:
        """The values of the first records that can be read."""
        readable = (record.value for record in self.records() if isinstance(record, Record))
        return list(islice(readable, _HEAD_RECORDS))

    def contains(self, word: bytes) -> bool:
        """Whether the word is, or may be, in the text of the file: in compressed messages, or in what cannot be unpacked."""
        rest = b""
        try:
            with self._open() as stream:
                while chunk := stream.read(_CHUNK):
                    text = rest + chunk
                    if word in text or (not rest and _is_framed(text) and text[4:8] == _ZSTD):
                        return True
                    rest = text[-len(word) :]
        except (OSError, EOFError, zlib.error):
            return True  # `records` says what is wrong with it
        return False

    def records(self) -> Iterator[Record | Broken]:
        """In their order. A line or message that cannot be read is Broken; what cannot be unpacked further ends the file."""
        line = 0
        try:
            with self._open() as stream:
                for record in _records(stream):
                    line = record.line
                    yield record
        except (OSError, EOFError, zlib.error) as error:
            yield Broken(line + 1, f"the file cannot be read further: {error}")

    def _open(self) -> BinaryIO:
        raw: Any = _Counted(self.path.open("rb"), self._on_bytes)
        head = io.BufferedReader(raw, _CHUNK)
        magic = head.peek(4)[:4]
        if magic.startswith(_GZIP):
            return io.BufferedReader(_Pieces(gzip.GzipFile(fileobj=head)), _CHUNK)
        return _unzstd(head) if magic == _ZSTD else head


class _Counted(io.RawIOBase):
    """A file that tells how much of it was read."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file, self._tell = file, on_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n_read = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._tell(n_read or 0)
        return int(n_read or 0)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Pieces(io.RawIOBase):
    """A compressed file whose text comes as far as it can be unpacked, before an error does."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read1(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._file.close()
        super().close()


def _unzstd(stream: Any) -> BinaryIO:
    import pyarrow

    unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")
    return io.BufferedReader(unpacked, _CHUNK)


def _records(stream: BinaryIO) -> Iterator[Record | Broken]:
    head: bytes = stream.peek(_CHUNK)  # type: ignore[attr-defined]
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        if _is_document(text):
            yield from (_checked(line, value) for line, value in document_records(stream, MOST_BYTES))
        else:
            yield from _lines(stream)
    elif _is_framed(head):
        yield from _frames(stream)
    elif head[:1] == b"\x0a":
        yield from _single_message(stream)
    elif _is_delimited(head):
        yield from _delimited(stream)
    else:
        yield from _lines(stream)


def _checked(line: int, value: Any) -> Record | Broken:
    return Broken(line, str(value)) if isinstance(value, InvalidRecordError) else Record(line, value)


def _is_document(text: bytes) -> bool:
    """Whether a JSON value extends over lines: it is a list, or neither the first nor the second line is a whole object."""
    if text[:1] == b"[":
        return True
    lines = [line for line in text.split(b"\n") if line.strip()][:2]
    return len(lines) > 1 and not any(_is_whole(line) for line in lines)


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _lines(stream: BinaryIO) -> Iterator[Record | Broken]:
    number = 0
    while line := stream.readline(MOST_BYTES):
        number += 1
        if len(line) == MOST_BYTES and not line.endswith(b"\n"):
            while (more := stream.readline(MOST_BYTES)) and not more.endswith(b"\n"):
                pass
            yield Broken(number, f"longer than {MOST_BYTES >> 20} MiB")
            continue
        if line.strip():
            yield _parsed(line, number)


def _parsed(line: bytes, number: int) -> Record | Broken:
    try:
        value = json.loads(line)
    except RecursionError:
        return Broken(number, "nested too deeply")
    except ValueError as error:
        return Broken(number, f"not JSON: {error}")
    if b"\\ud" in line or b"\\uD" in line:
        value = well_formed(value, "import", "\ufffd")
    return Record(number, value)


def _is_framed(head: bytes) -> bool:
    """Whether messages follow their length in 4 bytes, as the OpenTelemetry Collector's file exporter writes them."""
    return len(head) > 4 and head[0] == 0 and (head[4:5] in (b"\x0a", b"{") or head[4:8] == _ZSTD)


def _frames(stream: BinaryIO) -> Iterator[Record | Broken]:
    number = 0
    while prefix := stream.read(4):
        number += 1
        length = int.from_bytes(prefix, "big")
        if len(prefix) < 4 or length > MOST_BYTES:
            yield Broken(number, f"a message of {length} bytes; the rest of the file is left out")
            return
        body = stream.read(length)
        if len(body) < length:
            yield Broken(number, "the file ends within a message")
            return
        yield _message(body, number)


def _message(body: bytes, number: int) -> Record | Broken:
    if body.startswith(_ZSTD):
        try:
            body = _unzstd(io.BytesIO(body)).read(MOST_BYTES + 1)
        except OSError as error:
            return Broken(number, f"not zstd: {error}")
        if len(body) > MOST_BYTES:
            return Broken(number, f"longer than {MOST_BYTES >> 20} MiB")
    return _parsed(body, number) if body[:1] == b"{" else Record(number, body)


def _is_delimited(head: bytes) -> bool:
    """Whether messages follow their length as a varint, as OpenTelemetry's specification of files says."""
    length, n_bytes = _varint(head)
    inner, _ = _varint(head[n_bytes + 1 :])
    return head[n_bytes : n_bytes + 1] == b"\x0a" and 0 < inner < length  # the first field is within the message


def _delimited(stream: BinaryIO) -> Iterator[Record | Broken]:
    number = 0
    while head := stream.peek(10)[:10]:  # type: ignore[attr-defined]
        number += 1
        length, n_bytes = _varint(head)
        stream.read(n_bytes)
        body = stream.read(length) if n_bytes and length <= MOST_BYTES else b""
        if not n_bytes or len(body) < length:
            yield Broken(number, f"a message of {length} bytes; the rest of the file is left out")
            return
        yield Record(number, body)


def _varint(data: bytes) -> tuple[int, int]:
    """(value, number of bytes); (0, 0) if there is none."""
    value = 0
    for index, byte in enumerate(data[:5]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, index + 1
    return 0, 0


def _single_message(stream: BinaryIO) -> Iterator[Record | Broken]:
    body = stream.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        yield Broken(1, f"longer than {MOST_BYTES >> 20} MiB")
    else:
        yield Record(1, body)

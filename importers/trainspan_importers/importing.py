"""Reads files of other tools, makes each trace a rollout, and hands on what they become."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from trainspan_importers.account import Account
from trainspan_importers.formats.catalog import FORMATS, format_named, recognized
from trainspan_importers.reading import Converted, Format, Reader
from trainspan_importers.source_files import Broken, Record, SourceFile, files_of
from trainspan_importers.traces import SHAPE_ERRORS, Item, Trace, fault_of, key_values
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry import keys

__all__ = ["ImportRequest", "Imported", "import_files"]

_IDENTITY: Final = b"trainspan.rollout.id"
_ENOUGH_TRACES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What to import."""

    sources: Sequence[Path]
    """Files, and folders of files."""
    format: str | None = None
    """Of all files; None: each file's is found by its content."""
    reward: float | None = None
    """An evaluation `reward` that each rollout of these files gets."""


@dataclass(slots=True)
class Imported:
    """What was read."""

    accounts: dict[str, Account] = field(default_factory=dict)
    """By format."""
    unknown: list[Path] = field(default_factory=list)
    """Files of the folders whose format is none of those known."""

    @property
    def is_empty(self) -> bool:
        return not any(account.spans + account.evaluations + account.logs for account in self.accounts.values())


def import_files(
    request: ImportRequest,
    send: Callable[[Item], None],
    on_span: Callable[[Account, Span], None] = lambda _account, _span: None,
    on_bytes: Callable[[int], None] = lambda _n: None,
) -> Imported:
    """Passes everything in the files to `send`, file by file; memory does not grow with their size.

    `on_span` sees each span, `on_bytes` the number of a file's own bytes that were read. Raises UsageError if a file that is
    named itself has no known format, and nothing was sent then.
    """
    result = Imported()
    files = _with_formats(request, result)
    for known in FORMATS:
        of_format = [file for file, of, _ in files if of is known]
        if of_format:
            account = result.accounts.setdefault(known.name, Account(known.name))
            _Import(request, known, account, send, on_span).read(of_format, on_bytes)
    return result


def _with_formats(request: ImportRequest, result: Imported) -> list[tuple[Path, Format, bool]]:
    """Each file with its format; those that are about records of others first."""
    with_format = []
    for path, is_named in files_of(request.sources):
        head = SourceFile(path).head()
        known = format_named(request.format) if request.format else recognized(head)
        if known is not None:
            with_format.append((path, known, any(map(known.comes_first, head))))
        elif is_named:
            raise UsageError(
                f"{path}: none of its first records is of a known format; name it with --format "
                f"({', '.join(each.name for each in FORMATS)})"
            )
        else:
            result.unknown.append(path)
    return sorted(with_format, key=lambda entry: not entry[2])


class _Import:
    """All files of one format."""

    def __init__(
        self,
        request: ImportRequest,
        known: Format,
        account: Account,
        send: Callable[[Item], None],
        on_span: Callable[[Account, Span], None],
    ) -> None:
        self._request, self._format, self._account = request, known, account
        self._send, self._on_span = send, on_span
        self._reader: Reader = known.reader(account)
        self._own: set[bytes] = set()
        """Traces whose spans name their rollouts."""
        self._rooted: set[bytes] = set()
        self._rootless: set[bytes] = set()

    def read(self, paths: Sequence[Path], on_bytes: Callable[[int], None]) -> None:
        for path in paths if self._format.has_identities else ():
            self._find_own_traces(SourceFile(path))
        for path in paths:
            self._account.files += 1
            self._read_file(SourceFile(path, on_bytes))
        self._take(self._reader.end(), self._format.title)
        if self._rootless:
            self._account.leave_out("no_root", n_parts=len(self._rootless))

    def _find_own_traces(self, file: SourceFile) -> None:
        if not file.contains(_IDENTITY):
            return
        reader = self._format.reader(Account(self._format.name))
        for record in file.records():
            if isinstance(record, Record):
                items = [item for item in _converted(reader, record) if isinstance(item, Item)]
                self._own |= {
                    _trace_id(item)
                    for item in items
                    if any(pair.key == keys.ROLLOUT_ID for pair in item.message.attributes)
                }

    def _read_file(self, file: SourceFile) -> None:
        for record in file.records():
            self._account.records += 1
            position = f"{file.path}:{record.line}"
            if isinstance(record, Broken):
                self._account.leave_out("broken", f"{position}: {record.why}")
            else:
                self._take(_converted(self._reader, record), position)
        self._take(self._reader.end_of_file(), str(file.path))

    def _take(self, made: Iterable[Converted], position: str) -> None:
        try:
            for item in made:
                if isinstance(item, Item):
                    self._hand_on(item)
                else:
                    self._account.leave_out("broken", f"{position}: {item}")
        except SHAPE_ERRORS as error:
            self._account.leave_out("broken", f"{position}: {fault_of(error)}")

    def _hand_on(self, item: Item) -> None:
        message = item.message
        if not isinstance(message, Span):
            is_evaluation = any(pair.key == keys.EVALUATION_NAME for pair in message.attributes)
            self._account.evaluations += is_evaluation
            self._account.logs += not is_evaluation
            self._send(item)
            return
        self._account.spans += 1
        if not message.parent_span_id:
            self._make_rollout(message, item)
        elif message.trace_id not in self._rooted and len(self._rootless) < _ENOUGH_TRACES:
            self._rootless.add(message.trace_id)
        self._on_span(self._account, message)
        self._send(item)

    def _make_rollout(self, root: Span, item: Item) -> None:
        """Gives a root span the attributes that make its trace a rollout, unless spans of it name one.

        A further root of the trace is of the same rollout, whose end the first one is.
        """
        is_first = root.trace_id not in self._rooted
        self._rootless.discard(root.trace_id)
        self._rooted.add(root.trace_id)
        if root.trace_id in self._own:
            self._account.own_rollouts += is_first
            return
        rollout_id = root.trace_id.hex()
        root.attributes.extend(key_values({keys.ROLLOUT_ID: rollout_id, keys.IMPORTED_FROM: self._format.name}))
        if not is_first:
            return
        status = "agent_error" if root.status.code == 2 else "ok"
        root.attributes.extend(key_values({keys.ROLLOUT_STATUS: status, keys.ROLLOUT_BOUNDARY: "imported"}))
        self._account.rollouts += 1
        if self._request.reward is not None:
            trace = Trace(self._format.name, rollout_id, item.origin)
            time_ns = root.end_time_unix_nano
            reward = trace.evaluation(
                f"--reward {rollout_id}", keys.REWARD, score=self._request.reward, time_ns=time_ns, is_human=True
            )
            self._account.evaluations += 1
            self._send(reward)


def _converted(reader: Reader, record: Record) -> list[Converted]:
    """What a record becomes; all of it is made before any of it is sent."""
    try:
        return list(reader.add(record.value))
    except SHAPE_ERRORS as error:
        return [fault_of(error)]


def _trace_id(item: Item) -> bytes:
    return bytes(item.message.trace_id)

"""Reads one or several stores over Arrow Flight, in batches of bounded size."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import polars as pl

from trainspan_processing.tables import SPAN_KEY
from trainspan_schemas.errors import StoreError
from trainspan_schemas.store.access import open_store, server_message
from trainspan_schemas.store.endpoint import StoreEndpoint

__all__ = ["Selection", "Source"]

BATCH_BYTES = 16 * 1024 * 1024
IDS_PER_READ = 10_000
SEQS_PER_READ = 10_000
TRACES_PER_READ = 500
WAIT_MS = 10_000
_NUMBERED_READS = ("spans", "calls", "evaluations", "records")


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows that a read asks for; None: all."""

    run_id: str | None = None
    round: int | None = None
    rollout_ids: Sequence[str] | None = None
    stores: Sequence[int] | None = None
    """Numbers of the stores to read; None: all."""
    without_rollout: bool = False
    """Only rows without a rollout."""
    since_round: int | None = None
    """Only new rollouts of this round or later; reads do not depend on it."""
    since_seq: Sequence[int] | None = None
    """The same for rollouts that came after this place into the store: one for each store."""

    def parameters(self) -> Iterator[dict[str, object]]:
        """The parameters of one read, or of several for many ids."""
        fixed: dict[str, object] = {
            key: value for key, value in (("run_id", self.run_id), ("round", self.round)) if value is not None
        }
        if self.without_rollout:
            fixed["without_rollout"] = True
        if self.rollout_ids is None:
            yield fixed
            return
        for start in range(0, len(self.rollout_ids), IDS_PER_READ):
            yield {**fixed, "rollout_ids": list(self.rollout_ids[start : start + IDS_PER_READ])}


@dataclass(slots=True)
class Source:
    """The stores of one command, opened as a context manager; a store without a running collector gets one meanwhile.

    Raises StoreError if a store does not exist, cannot be reached, or has not yet loaded everything that it acknowledged
    (unless `allow_behind`).
    """

    stores: Sequence[str]
    allow_behind: bool = False
    watermarks: dict[int, int] = field(default_factory=dict)
    """Store number → highest `seq` that a read has seen; fixed while `is_held`."""
    is_held: bool = False
    """Whether reads leave out rows after the watermarks, so that all reads show the stores at one moment."""
    endpoints: Sequence[StoreEndpoint] | None = None
    """Where collectors of the stores answer; None until the stores are open, unless another process has opened them."""
    _clients: list[Any] = field(default_factory=list)
    _options: list[Any] = field(default_factory=list)
    _exit: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> "Source":
        from pyarrow import flight

        with contextlib.ExitStack() as stack:
            if self.endpoints is None:
                self.endpoints = [stack.enter_context(open_store(store)) for store in self.stores]
            for endpoint in self.endpoints:
                client = flight.connect(endpoint.location, **endpoint.connect_options)
                self._options.append(flight.FlightCallOptions(headers=endpoint.call_headers))
                stack.callback(client.close)
                self._clients.append(client)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def unopened(self) -> "Source":
        """The same view of the stores, for another process to open while they are open here."""
        return Source(self.stores, self.allow_behind, dict(self.watermarks), self.is_held, self.endpoints)

    def live(self) -> "Source":
        """The same open stores as they are now, also after the watermarks; for reads while they are open here."""
        return replace(self, watermarks={}, is_held=False)

    def read(
        self, name: str, selection: Selection, columns: Sequence[str], *, store: int | None = None, **more: object
    ) -> Iterator[pl.DataFrame]:
        """Batches of the read `name`, each with the column `store`; from the selection's stores, or only from number `store`.

        `more` are further parameters of the read.
        """
        is_cut = self.is_held and name in _NUMBERED_READS
        wanted = list(dict.fromkeys((*columns, "seq"))) if is_cut else list(columns)
        stores = range(len(self._clients)) if selection.stores is None else selection.stores
        for number in stores if store is None else (store,):
            for parameters in selection.parameters():
                asked = {**parameters, **more, "columns": wanted}
                ticket = {"read": name, "parameters": asked, "wait_ms": WAIT_MS}
                for batch in self._stream(number, ticket):
                    yield self._up_to_watermark(number, batch).select(*columns, "store") if is_cut else batch

    def tokens(self, store: int, seqs: Sequence[int], columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Batches of the read `tokens` for the calls with these `seq` in the store numbered `store`."""
        for start in range(0, len(seqs), SEQS_PER_READ):
            asked = {"seqs": list(seqs[start : start + SEQS_PER_READ]), "columns": list(columns)}
            yield from self._stream(store, {"read": "tokens", "parameters": asked, "wait_ms": WAIT_MS})

    def query(self, sql: str) -> Iterator[pl.DataFrame]:
        """Batches of one SELECT, from all stores; if `is_held`, rows with a `seq` after the watermark are left out."""
        for number in range(len(self._clients)):
            for batch in self._stream(number, {"sql": sql, "wait_ms": WAIT_MS}):
                yield self._up_to_watermark(number, batch) if "seq" in batch.columns else batch

    def is_within(self, seq: str) -> pl.Expr:
        """Whether the column `seq` of a frame with `store` is within the watermarks; always true unless `is_held`."""
        if not self.is_held:
            return pl.lit(value=True)
        last = pl.col("store").replace_strict(self.watermarks, default=None, return_dtype=pl.Int64)
        return (pl.col(seq) <= last).fill_null(value=False)

    def attributes(self, spans: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """trace_id, span_id and `attributes` of `spans` (with `store`, `seq`, trace_id, span_id), in batches, in any order.

        If a more complete copy has replaced a span, its attributes are returned; a deleted span gives no row.
        """
        for (store,), part in spans.partition_by("store", as_dict=True).items():
            for rows in part.select("seq", *SPAN_KEY).iter_slices(IDS_PER_READ):
                yield from self._attributes(int(str(store)), rows)

    def texts(self, trace_ids: Sequence[str], columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Batches of the read `texts` for the spans of these traces, from all stores."""
        for number in range(len(self._clients)):
            for start in range(0, len(trace_ids), TRACES_PER_READ):
                some = list(trace_ids[start : start + TRACES_PER_READ])
                yield from self._texts(number, columns, trace_ids=some)

    def _attributes(self, store: int, left: pl.DataFrame) -> Iterator[pl.DataFrame]:
        columns = (*SPAN_KEY, "attributes")
        for asked in ({"seqs": left["seq"].to_list()}, {"trace_ids": left["trace_id"].unique().to_list()}):
            for batch in self._texts(store, columns, **asked):
                yield batch.join(left, on=SPAN_KEY, how="semi").select(columns)
                left = left.join(batch, on=SPAN_KEY, how="anti")
            if left.is_empty():
                return

    def _texts(self, store: int, columns: Sequence[str], **asked: list[Any]) -> Iterator[pl.DataFrame]:
        parameters = {**asked, "columns": list(columns)}
        return self._stream(store, {"read": "texts", "parameters": parameters, "wait_ms": WAIT_MS})

    def _up_to_watermark(self, number: int, batch: pl.DataFrame) -> pl.DataFrame:
        if not self.is_held:
            return batch
        return batch.filter(pl.col("seq") <= self.watermarks.get(number, 0))

    def _stream(self, number: int, ticket: Mapping[str, object]) -> Iterator[pl.DataFrame]:
        import pyarrow as pa
        from pyarrow import flight

        try:
            reader = self._clients[number].do_get(flight.Ticket(json.dumps(ticket).encode()), self._options[number])
            self._check_watermark(number, reader.schema.metadata or {})
            pending: list[Any] = []
            size = 0
            for chunk in reader:
                pending.append(chunk.data)
                size += chunk.data.nbytes
                if size >= BATCH_BYTES:
                    yield self._frame(number, pending)
                    pending, size = [], 0
            if pending:
                yield self._frame(number, pending)
        except pa.ArrowException as error:
            message = server_message(error).splitlines()[0]
            raise StoreError(f"store {self.stores[number]}: reading failed: {message}") from error

    def _frame(self, number: int, batches: list[Any]) -> pl.DataFrame:
        import pyarrow as pa

        frame = pl.from_arrow(pa.Table.from_batches(batches), rechunk=False)
        assert isinstance(frame, pl.DataFrame)
        return frame.with_columns(pl.lit(number, dtype=pl.UInt8).alias("store"))

    def _check_watermark(self, number: int, metadata: dict[bytes, bytes]) -> None:
        reached = int(metadata.get(b"watermark", b"0"))
        if not self.is_held:
            self.watermarks[number] = max(reached, self.watermarks.get(number, 0))
        if metadata.get(b"behind") == b"true" and not self.allow_behind:
            raise StoreError(
                f"store {self.stores[number]} has not loaded all acknowledged data (up to seq {reached}): "
                "try again in a moment, or build from the loaded data with --allow-behind"
            )

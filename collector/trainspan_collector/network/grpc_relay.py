"""Passes the bytes of a gRPC client that came to the HTTP server on to the gRPC server, and back.

So one port speaks both OTLP/gRPC and OTLP/HTTP: whatever an exporter makes of `OTEL_EXPORTER_OTLP_ENDPOINT`, it is understood.
"""

import asyncio
from typing import Final

__all__ = ["PREFACE", "relay"]

PREFACE: Final = b"PRI "
"""The first bytes of a client of HTTP/2 (RFC 9113, 3.4). PRI is reserved: it is no method of HTTP/1.1 (RFC 9113, 11.6)."""
_BUFFER_BYTES: Final = 1 << 18


async def relay(client: asyncio.Transport, first: bytes, port: int) -> None:
    """Connects a client to the gRPC server at the local `port`; `first` is what it has sent already, and it is not read."""
    try:
        loop = asyncio.get_running_loop()
        server, server_side = await loop.create_connection(_Side, "127.0.0.1", port)
    except OSError:  # it has stopped
        client.abort()
        return
    client_side = _Side()
    client_side.transport, client_side.other, server_side.other = client, server, client
    client.set_protocol(client_side)
    server.write(first)
    if client.is_closing():
        server.close()
    else:
        client.resume_reading()


class _Side(asyncio.BufferedProtocol):
    """One of the two connections; what it reads, `other` writes."""

    buffer = bytearray(_BUFFER_BYTES)
    """For the reads of all: each is written before the next one."""
    transport: asyncio.Transport
    other: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return _Side.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.other is not None:
            self.other.write(memoryview(_Side.buffer)[:nbytes])
            if self.other.get_write_buffer_size():  # it may hold on to the buffer
                _Side.buffer = bytearray(_BUFFER_BYTES)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()

"""OTLP over plain HTTP connections, so that the test controls every header and byte."""

import contextlib
import gzip
import http.client
import socket
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from google.protobuf.json_format import Parse
from google.rpc.status_pb2 import Status

from trainspan_schemas.store.access import StoreAddress

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> Status:
        """The google.rpc.Status in the body of an error."""
        if self.headers["content-type"].startswith(PROTOBUF):
            return Status.FromString(self.body)
        return Parse(self.body, Status())


def request(
    address: StoreAddress,
    path: str,
    body: bytes | Iterable[bytes] | None = None,
    *,
    method: str = "POST",
    content_type: str | None = PROTOBUF,
    headers: Mapping[str, str | None] | None = None,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = 30,
) -> Answer:
    """Sends one request; a body that is not bytes is sent chunked, one chunk per item.

    It has the runner's token from the address file, unless `headers` contain an authorization, or None.
    """
    host, _, port = str(address.http).rpartition(":")
    connection = (
        http.client.HTTPSConnection("localhost", int(port), context=tls, timeout=timeout_s)
        if tls
        else http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    )
    shown = {"authorization": f"Bearer {address.token}"} if address.token else {}
    if any(name.lower() == "authorization" for name in headers or {}):
        shown = {}
    wanted = {**({"Content-Type": content_type} if content_type else {}), **shown, **(headers or {})}
    named = {name: value for name, value in wanted.items() if value is not None}
    chunked = body is not None and not isinstance(body, bytes)
    if chunked:
        named["Transfer-Encoding"] = "chunked"
    try:
        connection.request(method, path, body, named, encode_chunked=chunked)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())
    finally:
        connection.close()


def gzipped(body: bytes) -> bytes:
    return gzip.compress(body, 1)


def raw(address: StoreAddress, data: bytes, timeout_s: float = 10) -> bytes:
    """Returns the response to bytes that need not be HTTP; closes the writing side of the connection after them."""
    host, _, port = str(address.http).rpartition(":")
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        connection.sendall(data)
        with contextlib.suppress(OSError):  # the server may have closed it already
            connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)

"""Runs the web server until a signal stops it."""

import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from trainspan_schemas.config.settings import ViewSettings
from trainspan_schemas.errors import ConfigError, UsageError
from trainspan_schemas.http_connection import BoundedConnection
from trainspan_schemas.store.roles import Role, home_token_file, read_tokens
from trainspan_schemas.web_origins import own_hosts
from trainspan_viewer.queries.labels.sending import LabelSender
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.server.app import make_app
from trainspan_viewer.server.guard import Guard

__all__ = ["Listening", "serve"]

_HEADER_BYTES = 65_536
_LAST_PORT = 65_535
_REST_S = 5.0


@dataclass(frozen=True, slots=True)
class Listening:
    """A server that listens."""

    url: str
    guard: Guard

    def address(self, path: str, *, once: bool = False) -> str:
        """The address of a page with a key that opens the pages; with `once` it opens them only once."""
        if self.guard.is_open:
            return self.url + path
        return f"{self.url}{path}?key={self.guard.ticket() if once else self.guard.key}"


def serve(settings: ViewSettings, sources: Sources, sender: LabelSender, on_ready: Callable[[Listening], None]) -> None:
    """Serves until SIGINT or SIGTERM; labels go to `sender`. `on_ready` is called once it listens.

    Raises ConfigError or UsageError if the settings cannot be served.
    """
    family, bound = _resolved(settings.host, settings.port)
    is_loopback = ipaddress.ip_address(bound[0].partition("%")[0]).is_loopback
    if not is_loopback and not (settings.tls_cert or settings.insecure_allow_remote):
        raise ConfigError(
            f"[view] host {settings.host} can be reached by other machines: set tls_cert and tls_key, "
            "or insecure_allow_remote if a proxy adds TLS"
        )
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise ConfigError("[view] tls_cert and tls_key are needed together")
    if settings.open_to_all and not is_loopback:
        raise ConfigError("[view] open_to_all is for this machine only: remove it, or set host to 127.0.0.1")
    reader, runner = (_tokens(settings, role) for role in (Role.READER, Role.RUNNER))
    listener = _bound(family, bound)
    port = int(listener.getsockname()[1])
    scheme = "https" if settings.tls_cert else "http"
    guard = Guard(
        own_hosts(settings.host, settings.allowed_hosts),
        (*reader, *runner),
        port,
        is_secure=bool(settings.tls_cert),
        is_open=settings.open_to_all,
        is_read_only=settings.read_only,
        label_tokens=runner,
    )
    config = uvicorn.Config(
        make_app(sources, sender, guard, page_wait_s=settings.page_wait_ms / 1000),
        log_level="warning",
        lifespan="off",
        server_header=False,
        access_log=False,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_keep_alive=20,
        timeout_graceful_shutdown=3,
        proxy_headers=False,
        http=BoundedConnection,
        ws="none",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    server = _Server(config, lambda: on_ready(Listening(f"{scheme}://{name}:{port}", guard)))
    with listener:
        try:
            config.load()
        except OSError as error:  # of which SSLError is one
            raise ConfigError(
                f"[view] tls_cert {settings.tls_cert} and tls_key {settings.tls_key} cannot be used: {error}"
            ) from error
        with _resting(sources), _ending():
            server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Lets SIGTERM unwind the stack: uvicorn raises the signal again at its end, which would kill the process."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _resting(sources: Sources) -> Iterator[None]:
    """Closes the connection to the store when nobody views pages, and at the end."""
    ended = threading.Event()

    def rest() -> None:
        while not ended.wait(_REST_S):
            sources.store.close_if_idle()

    thread = threading.Thread(target=rest, name="rest", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sources.store.close()


def _tokens(settings: ViewSettings, role: Role) -> tuple[str, ...]:
    """The tokens of a role. None if the state folder has no tokens yet: nothing is written here."""
    file = settings.token_file or home_token_file()
    if settings.open_to_all or not (settings.token_file or home_token_file().exists()):
        return ()
    by_role = read_tokens(file)
    if not any(by_role.get(role) for role in (Role.READER, Role.RUNNER)):
        raise ConfigError(f"token file {file} has no token for the role reader or runner")
    value = by_role.get(role)
    return tuple(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, str))


def _resolved(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """The address family and the address to bind, which a name may hide. Raises UsageError."""
    if not 0 <= port <= _LAST_PORT:
        raise UsageError(f"port {port} is not between 0 and {_LAST_PORT}")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"[view] host {host!r} is no address of this machine: {error}") from error
    return family, address


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {address[0]}:{address[1]}: {error.strerror}; choose another --port, 0 for any"
        ) from error
    return listener

"""Runs the web server until it is told to stop."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from trainspan_schemas.endpoint import is_this_machine
from trainspan_schemas.errors import ConfigError, UsageError
from trainspan_schemas.roles import Role, make_home_token_file, read_tokens
from trainspan_schemas.settings import ViewSettings
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.server.app import make_app
from trainspan_viewer.server.guard import Guard

__all__ = ["serve"]

_HEADER_BYTES = 65_536
_CONNECTIONS = 256
_REST_S = 5.0


def serve(settings: ViewSettings, sources: Sources, on_ready: Callable[[str, str], None]) -> None:
    """Serves until SIGINT or SIGTERM. `on_ready` gets the server's URL and the token, once it listens ("" if none is needed).

    Raises ConfigError or UsageError if the settings cannot be served.
    """
    if not is_this_machine(settings.host) and not (settings.tls_cert or settings.insecure_allow_remote):
        raise ConfigError(
            f"[view] host {settings.host} can be reached by other machines: set tls_cert and tls_key, "
            "or insecure_allow_remote if a proxy adds TLS"
        )
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise ConfigError("[view] tls_cert and tls_key are needed together")
    tokens = _tokens(settings)
    listener = _bound(settings.host, settings.port)
    port = int(listener.getsockname()[1])
    scheme = "https" if settings.tls_cert else "http"
    hosts = {"localhost", socket.gethostname().lower(), settings.host.lower(), *_names(settings.allowed_hosts)}
    guard = Guard(frozenset(hosts), tokens, port, is_secure=bool(settings.tls_cert))
    config = uvicorn.Config(
        make_app(sources, guard),
        log_level="warning",
        lifespan="off",
        server_header=False,
        access_log=False,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=3,
        proxy_headers=False,
        http="h11",
        ws="none",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    server = _Server(config, lambda: on_ready(f"{scheme}://{name}:{port}", tokens[0] if tokens else ""))
    with listener, _resting(sources):
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


def _tokens(settings: ViewSettings) -> tuple[str, ...]:
    """The tokens of the roles that may read; the reader's is first."""
    if settings.open_to_all:
        if not is_this_machine(settings.host):
            raise ConfigError("[view] open_to_all is for this machine only: remove it, or set host to 127.0.0.1")
        return ()
    file = settings.token_file or make_home_token_file()
    found = read_tokens(file)
    values = [found.get(role) for role in (Role.READER, Role.RUNNER)]
    tokens = [
        one for value in values for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)
    ]
    if not tokens:
        raise ConfigError(f"token file {file} has no token for the role reader or runner")
    return tuple(tokens)


def _names(listed: str) -> Iterator[str]:
    return (name.strip().lower() for name in listed.split(",") if name.strip())


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, 0 for any"
        ) from error
    return listener

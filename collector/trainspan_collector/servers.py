"""The listeners. They stay up while the store is reopened: senders are told to retry later, and readers wait."""

import socket
from collections.abc import Callable

from trainspan_collector.network.credentials import AccessControl
from trainspan_collector.network.ports import Address, bind, check_free
from trainspan_collector.query.flight_server import FlightServer, ReadableStore
from trainspan_collector.receive.admission import Admission
from trainspan_collector.receive.export_handler import ExportHandler
from trainspan_collector.receive.grpc_server import GrpcServer
from trainspan_collector.receive.http_app import HttpApp
from trainspan_collector.receive.http_server import HttpServer, listen
from trainspan_collector.receive.memory_budget import MemoryBudget
from trainspan_collector.receive.redaction import Redaction
from trainspan_collector.runtime.metrics import Metrics, StoreState
from trainspan_schemas.config.settings import CollectorSettings
from trainspan_schemas.web_origins import own_hosts

__all__ = ["Servers"]

_GRACE_S = 5.0
_READER_GRACE_S = 10.0


class Servers:
    """OTLP/gRPC, OTLP/HTTP and Flight. Bound by `bind`, started by the first `open_to`, stopped by `close`.

    Without TLS, the ports of OTLP/gRPC and OTLP/HTTP each speak both: the HTTP server listens at both, and passes clients of
    gRPC on to the gRPC server's. With TLS, what a client speaks cannot be seen.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        grpc: Address | None,
        http: Address | None,
        guard: AccessControl,
        metrics: Metrics,
        *,
        flight: Address | None = None,
    ) -> None:
        self._settings = settings
        self._grpc = grpc
        self._http = http
        self._flight = flight
        self.guard = guard
        self.metrics = metrics
        blocked_keys = [key.strip() for key in settings.blocked_keys.split(",") if key.strip()]
        self.budget = MemoryBudget(settings.max_inflight_bytes, settings.overload_wait_s)
        self._exports = ExportHandler(
            Redaction(blocked_keys), metrics, self.budget, max_items=settings.max_request_items
        )
        self._grpc_server: GrpcServer | None = None
        self._http_server: HttpServer | None = None
        self._flight_server: FlightServer | None = None
        self._grpc_listener: socket.socket | None = None
        """The gRPC server's port, if the HTTP server listens there."""
        self._started = False

    @property
    def grpc_address(self) -> str | None:
        """HOST:PORT as bound."""
        if self._grpc is None or self._grpc_server is None:
            return None
        listener = self._grpc_listener
        return f"{self._grpc.host}:{listener.getsockname()[1] if listener else self._grpc_server.port}"

    @property
    def http_address(self) -> str | None:
        return f"{self._http.host}:{self._http_server.port}" if self._http and self._http_server else None

    @property
    def flight_address(self) -> str | None:
        return f"{self._flight.host}:{self._flight_server.port}" if self._flight and self._flight_server else None

    def bind(self) -> None:
        """Binds the ports, once. Raises StoreError if some are in use, with all of them."""
        wanted = ((self._grpc, self._grpc_server), (self._http, self._http_server), (self._flight, self._flight_server))
        check_free(address for address, server in wanted if address is not None and server is None)
        shares = self._grpc is not None and self._http is not None and self.guard.tls is None
        if self._grpc is not None and self._grpc_server is None:
            if shares:
                self._grpc_listener = bind(self._grpc, listen)
                self._grpc_server = self._make_receiver("127.0.0.1:0")
            else:
                self._grpc_server = bind(self._grpc, self._make_receiver)
        if self._http is not None and self._http_server is None:
            self._http_server = bind(self._http, self._make_http_server)
            if self._grpc_listener is not None:
                self._http_server.share(self._grpc_listener)
        if self._flight is not None and self._flight_server is None:
            self._flight_server = bind(self._flight, lambda address: FlightServer(address, self.guard))

    def open_to(
        self, admission: Admission, state: Callable[[], StoreState], reading: ReadableStore | None = None
    ) -> None:
        """From now on, requests go to `admission`, metrics report `state`, and readers get `reading`."""
        self._exports.attach(admission)
        self.metrics.watch(state)
        if self._grpc_server is not None:
            self._grpc_server.say_ready(True)
        if self._flight_server is not None and reading is not None:
            self._flight_server.open_to(reading)
        if not self._started:
            self._started = True
            for server in (self._grpc_server, self._http_server, self._flight_server):
                if server is not None:
                    server.start()

    def shut(self) -> None:
        """From now on, requests are refused with a retry delay."""
        if self._grpc_server is not None:
            self._grpc_server.say_ready(False)
        self._exports.detach()
        self.metrics.watch(None)

    def shut_readers(self) -> None:
        """From now on, new readers wait; running ones get a moment to finish, then they are ended."""
        if self._flight_server is not None:
            self._flight_server.shut(_READER_GRACE_S)

    def close(self) -> None:
        """Lets running requests finish, then releases the ports."""
        for server in (self._grpc_server, self._http_server, self._flight_server):
            if server is not None:
                server.stop(_GRACE_S)

    def _make_receiver(self, address: str) -> GrpcServer:
        return GrpcServer(
            address,
            self._exports,
            guard=self.guard,
            metrics=self.metrics,
            max_request_bytes=self._settings.max_request_bytes,
        )

    def _make_http_server(self, address: str) -> HttpServer:
        hosts = own_hosts(self._http.host if self._http else "", self._settings.allowed_hosts)
        web = HttpApp(
            self._exports,
            access=self.guard.access,
            metrics=self.metrics,
            max_request_bytes=self._settings.max_request_bytes,
            hosts=hosts if self.guard.access.admits_agents else None,
        )
        grpc_port = self._grpc_server.port if self._grpc_server and self._grpc_listener else None
        return HttpServer(address, web, guard=self.guard, grpc_port=grpc_port)

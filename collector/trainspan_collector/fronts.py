"""The listeners of OTLP: they outlive the store, so that senders are told to come back while it is opened again."""

from collections.abc import Callable
from dataclasses import dataclass

from trainspan_collector.access import Access
from trainspan_collector.exports import Exports
from trainspan_collector.http_server import HttpServer
from trainspan_collector.intake import Intake
from trainspan_collector.listeners import Address, Tls, bind
from trainspan_collector.metrics import Metrics, StoreState
from trainspan_collector.receiver import Receiver
from trainspan_collector.redaction import Redaction
from trainspan_collector.web import Web
from trainspan_schemas.settings import CollectorSettings

__all__ = ["Fronts", "Guard"]

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Guard:
    """What protects every listener: who may do what, and how the connection is encrypted."""

    access: Access
    tls: Tls | None
    own_token: str | None = None
    """For commands of the same user, in the store's address file."""


class Fronts:
    """OTLP/gRPC and OTLP/HTTP. Bound and started by the first `open_to`, stopped by `close`."""

    def __init__(
        self, settings: CollectorSettings, grpc: Address | None, http: Address | None, guard: Guard, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._grpc = grpc
        self._http = http
        self.guard = guard
        self.metrics = metrics
        blocked_keys = [key.strip() for key in settings.blocked_keys.split(",") if key.strip()]
        self._exports = Exports(Redaction(blocked_keys), metrics)
        self._receiver: Receiver | None = None
        self._http_server: HttpServer | None = None
        self._started = False

    @property
    def grpc_address(self) -> str | None:
        """HOST:PORT as bound."""
        return f"{self._grpc.host}:{self._receiver.port}" if self._grpc and self._receiver else None

    @property
    def http_address(self) -> str | None:
        return f"{self._http.host}:{self._http_server.port}" if self._http and self._http_server else None

    def bind(self) -> None:
        """Takes the ports, once. Raises StoreError where one is taken."""
        if self._grpc is not None and self._receiver is None:
            self._receiver = bind(self._grpc, self._make_receiver)
        if self._http is not None and self._http_server is None:
            self._http_server = bind(self._http, self._make_http_server)

    def open_to(self, intake: Intake, state: Callable[[], StoreState]) -> None:
        """From now on requests are taken to `intake`, and metrics tell `state`."""
        self._exports.attach(intake)
        self.metrics.watch(state)
        if self._receiver is not None:
            self._receiver.say_ready(True)
        if not self._started:
            self._started = True
            for front in (self._receiver, self._http_server):
                if front is not None:
                    front.start()

    def shut(self) -> None:
        """From now on requests are refused with the advice to come back."""
        if self._receiver is not None:
            self._receiver.say_ready(False)
        self._exports.detach()
        self.metrics.watch(None)

    def close(self) -> None:
        """Lets requests under way finish, then lets go of the ports."""
        for front in (self._receiver, self._http_server):
            if front is not None:
                front.stop(_GRACE_S)

    def _make_receiver(self, address: str) -> Receiver:
        return Receiver(
            address,
            self._exports,
            access=self.guard.access,
            metrics=self.metrics,
            tls=self.guard.tls,
            max_request_bytes=self._settings.max_request_bytes,
        )

    def _make_http_server(self, address: str) -> HttpServer:
        web = Web(
            self._exports,
            access=self.guard.access,
            metrics=self.metrics,
            max_request_bytes=self._settings.max_request_bytes,
            max_inflight_bytes=self._settings.max_inflight_bytes,
            wait_s=self._settings.overload_wait_s,
        )
        return HttpServer(address, web, tls=self.guard.tls)

"""The socket between the supervisor and the server process it started.

The server sends events as JSON lines. The supervisor sends nothing, but if it dies its end closes,
and the server stops too instead of holding the port as an orphan.
"""

import json
import os
import signal
import socket
import threading
from typing import Literal, TypeAlias, TypedDict

__all__ = ["LINK_VARIABLE", "LinkEvent", "follow_supervisor", "report"]

LINK_VARIABLE = "TRAINSPAN_SERVER_LINK"


class ReadyEvent(TypedDict):
    """The server answers."""

    event: Literal["ready"]


class PolicyEvent(TypedDict):
    """Another version of a policy is in service: a server that is started again has to serve it."""

    event: Literal["policy"]
    policy: str | None
    """Its name; None if there is one policy."""
    model: str
    """The folder of the full weights."""
    adapter: str | None
    """The folder of its adapter."""
    version: int


LinkEvent: TypeAlias = ReadyEvent | PolicyEvent

_up: socket.socket | None = None


def follow_supervisor() -> None:
    """Opens the link named in the environment, and stops this process when the other end closes."""
    global _up  # noqa: PLW0603 - one link per process, opened once before vLLM starts
    descriptor = os.environ.pop(LINK_VARIABLE, None)
    if descriptor is None:
        return
    _up = socket.socket(fileno=int(descriptor))
    _up.set_inheritable(False)
    threading.Thread(target=_stop_at_end, args=(_up,), name="trainspan-link", daemon=True).start()


def report(event: LinkEvent) -> None:
    """Sends `event` to the supervisor, if there is one."""
    if _up is not None:
        _up.sendall(json.dumps(event).encode() + b"\n")


def _stop_at_end(link: socket.socket) -> None:
    while link.recv(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

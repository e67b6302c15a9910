"""The socket between the supervisor and the server process it started.

The server sends events as JSON lines: {"event": "ready"} and {"event": "policy", "policy": name or null,
"model": folder, "adapter": folder or null, "version": n}. The supervisor sends nothing, but if it dies its end closes,
and the server stops too instead of holding the port as an orphan.
"""

import json
import os
import signal
import socket
import threading
from typing import Any

__all__ = ["LINK_VARIABLE", "follow_supervisor", "report"]

LINK_VARIABLE = "TRAINSPAN_SERVER_LINK"

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


def report(event: dict[str, Any]) -> None:
    """Sends `event` to the supervisor, if there is one."""
    if _up is not None:
        _up.sendall(json.dumps(event).encode() + b"\n")


def _stop_at_end(link: socket.socket) -> None:
    while link.recv(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

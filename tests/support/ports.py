"""Free ports for servers of tests."""

import random
import socket

__all__ = ["free_port", "free_ports"]

_FIRST, _LAST = 20_000, 32_000
"""Below the ports that the system gives to clients and to servers that take any: nobody else takes them meanwhile."""


def free_port() -> int:
    """Returns a port that is currently free."""
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                continue
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def free_ports(count: int) -> list[int]:
    """Returns different ports that are currently free."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)

"""Access control: bearer tokens, one or more per role, from a file that only its owner can read.

The same rule holds for every listener: a request carries `authorization: Bearer TOKEN`. If no tokens are configured, a sender
of telemetry without a token counts as an agent.
"""

import hashlib
import hmac
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Final

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.store.roles import Role, read_tokens

__all__ = ["Access", "DenialLog", "DeniedError", "Right", "Role", "bearer_of"]

log = logging.getLogger(__name__)

MIN_TOKEN_CHARACTERS: Final = 16
_DENIAL_PAUSE_S: Final = 60.0
_UNKNOWN: Final = "unknown token: use one from the collector's token file, by default the one in its TRAINSPAN_HOME"


class Right(Enum):
    """What a request needs to do, and the roles that may do it."""

    WRITE = "send telemetry", frozenset({Role.AGENT, Role.SERVING, Role.RUNNER, Role.USER})
    READ = "read the store", frozenset({Role.READER, Role.RUNNER})
    CHANGE = "maintain the store", frozenset({Role.RUNNER})

    def __init__(self, words: str, roles: frozenset[Role]) -> None:
        self.words = words
        self.roles = roles


_ENCODED: Final = re.compile(r"^(bearer)%20", re.IGNORECASE)


class DeniedError(Exception):
    """`is_known` separates roles without the right (403, PERMISSION_DENIED) from missing or invalid tokens (401, UNAUTHENTICATED)."""

    def __init__(self, message: str, *, is_known: bool) -> None:
        super().__init__(message)
        self.is_known = is_known


class DenialLog:
    """Logs why requests are denied: the first, then one line a minute with the number of those since. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due = 0.0
        self._n_more = 0

    def note(self, transport: str, error: DeniedError) -> None:
        """Logs a denial, or counts it."""
        with self._lock:
            if (now := self._clock()) < self._due:
                self._n_more += 1
                return
            n_more, self._n_more, self._due = self._n_more, 0, now + _DENIAL_PAUSE_S
        log.warning("denied transport=%s others_since_the_last_line=%d reason=%s", transport, n_more, error)


class Access:
    """The tokens, as hashes. Thread-safe."""

    def __init__(self, tokens: Mapping[str, Role], *, admits_agents: bool = False) -> None:
        """`admits_agents`: a client without a token may send telemetry, as an agent."""
        self._roles = {_digest(token): role for token, role in tokens.items()}
        self.admits_agents = admits_agents
        self.denials = DenialLog()

    @classmethod
    def from_file(cls, path: Path, *, admits_agents: bool = False) -> "Access":
        """Reads TOML lines `role = "token"` or `role = ["new", "old"]`.

        Raises ConfigError if others can read the file, or it has no tokens, weak tokens or duplicate tokens.
        """
        given = read_tokens(path)
        tokens: dict[str, Role] = {}
        for name, value in given.items():
            if name not in set(Role):
                raise ConfigError(f"token file {path}: unknown role {name!r}; roles are {', '.join(Role)}")
            for token in value if isinstance(value, list) else [value]:
                _check_token(path, name, token)
                if token in tokens:
                    raise ConfigError(f"token file {path}: {name} and {tokens[token]} have the same token")
                tokens[token] = Role(name)
        if not tokens:
            raise ConfigError(f'token file {path} has no token: add lines like reader = "…"')
        return cls(tokens, admits_agents=admits_agents)

    def with_token(self, token: str, role: Role) -> "Access":
        """These tokens and one more."""
        more = Access({}, admits_agents=self.admits_agents)
        more._roles = {**self._roles, _digest(token): role}
        return more

    def replace_by(self, other: "Access") -> None:
        """Replaces the tokens with those of `other`."""
        self._roles = other._roles

    def authorize(self, right: Right, authorization: str | None) -> Role:
        """The sender's role. Raises DeniedError."""
        if authorization is None and self.admits_agents and right is Right.WRITE:
            return Role.AGENT
        # Some exporters send OTEL_EXPORTER_OTLP_HEADERS as it is written, with a space as %20.
        scheme, _, token = _ENCODED.sub(r"\1 ", authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise DeniedError("send the header authorization: Bearer TOKEN", is_known=False)
        role = self._role_of(token.strip())
        if role is None:
            raise DeniedError(_UNKNOWN, is_known=False)
        if role not in right.roles:
            allowed = ", ".join(sorted(right.roles))
            raise DeniedError(f"the role {role} may not {right.words}; these may: {allowed}", is_known=True)
        return role

    def _role_of(self, token: str) -> Role | None:
        """Compares with every token, so that the time taken reveals nothing about any."""
        digest, matching = _digest(token), None
        for known, role in self._roles.items():
            if hmac.compare_digest(known, digest):
                matching = role
        return matching


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _check_token(path: Path, role: str, token: object) -> None:
    if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or " " in token:
        raise ConfigError(
            f"token file {path}: the token of {role} is not a string of {MIN_TOKEN_CHARACTERS} or more ASCII characters "
            "without spaces: make one with `openssl rand -hex 32`"
        )


def bearer_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The `authorization` value in gRPC metadata."""
    for key, value in metadata:
        if key == "authorization":
            return value if isinstance(value, str) else value.decode(errors="replace")
    return None

"""Who may do what: bearer tokens, one or more per role, from a file that only its owner reads.

One rule for every listener: a request carries `authorization: Bearer TOKEN`. Without a token file everybody is trusted.
"""

import hashlib
import hmac
import tomllib
from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum
from pathlib import Path
from typing import Final

from trainspan_schemas.errors import ConfigError

__all__ = ["Access", "DeniedError", "Right", "Role", "bearer_of"]

MIN_TOKEN_CHARACTERS: Final = 16


class Role(StrEnum):
    """What a token's holder is."""

    AGENT = "agent"
    """Sends spans; its word on identities and evaluations is kept and marked as untrusted."""
    SERVING = "serving"
    RUNNER = "runner"
    READER = "reader"


class Right(Enum):
    """What a request wants to do, and the roles that may."""

    WRITE = "send telemetry", frozenset({Role.AGENT, Role.SERVING, Role.RUNNER})
    READ = "read the store", frozenset({Role.READER, Role.RUNNER})
    CHANGE = "do upkeep of the store", frozenset({Role.RUNNER})

    def __init__(self, words: str, roles: frozenset[Role]) -> None:
        self.words = words
        self.roles = roles


class DeniedError(Exception):
    """`is_known` tells a role that may not (403, PERMISSION_DENIED) from no valid token (401, UNAUTHENTICATED)."""

    def __init__(self, message: str, *, is_known: bool) -> None:
        super().__init__(message)
        self.is_known = is_known


class Access:
    """The tokens, as hashes. Thread-safe."""

    def __init__(self, tokens: Mapping[str, Role] | None = None) -> None:
        """Without `tokens` everybody may do everything."""
        self._roles = {_digest(token): role for token, role in (tokens or {}).items()}

    @property
    def is_open(self) -> bool:
        return not self._roles

    @classmethod
    def from_file(cls, path: Path) -> "Access":
        """Reads TOML lines `role = "token"` or `role = ["new", "old"]`.

        Raises ConfigError where others can read the file, or it has no, weak, or doubly used tokens.
        """
        try:
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"token file {path} can be read by others: chmod 600 {path}")
            given = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"token file {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f'token file {path} is no TOML of role = "token": {error}') from error
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
            raise ConfigError(f'token file {path} has no token: write lines like reader = "…"')
        return cls(tokens)

    def with_token(self, token: str, role: Role) -> "Access":
        """These tokens and one more; where none are in use there is no need for it."""
        if self.is_open:
            return self
        more = Access()
        more._roles = {**self._roles, _digest(token): role}
        return more

    def replace_by(self, other: "Access") -> None:
        """From now on the tokens are those of `other`."""
        self._roles = other._roles

    def authorize(self, right: Right, authorization: str | None) -> Role | None:
        """The sender's role; None where no tokens are in use. Raises DeniedError."""
        if self.is_open:
            return None
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise DeniedError("send the header authorization: Bearer TOKEN", is_known=False)
        role = self._role_of(token.strip())
        if role is None:
            raise DeniedError("the token is not known here", is_known=False)
        if role not in right.roles:
            allowed = ", ".join(sorted(right.roles))
            raise DeniedError(f"the role {role} may not {right.words}; these may: {allowed}", is_known=True)
        return role

    def _role_of(self, token: str) -> Role | None:
        """Compares with every token, so that the time taken says nothing of any."""
        digest, found = _digest(token), None
        for known, role in self._roles.items():
            if hmac.compare_digest(known, digest):
                found = role
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _check_token(path: Path, role: str, token: object) -> None:
    if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or " " in token:
        raise ConfigError(
            f"token file {path}: the token of {role} is not a string of {MIN_TOKEN_CHARACTERS} or more ASCII characters "
            "without spaces: make one with `openssl rand -hex 32`"
        )


def bearer_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The `authorization` value among gRPC metadata."""
    for key, value in metadata:
        if key == "authorization":
            return value if isinstance(value, str) else value.decode(errors="replace")
    return None

"""The runner's signature on what it hands to agents: a rollout's identity, and the trace in a base URL.

A policy server that has the runner's key can tell an identity that the runner gave from one that a caller made up. The
signature is the first half of an HMAC-SHA256 (RFC 2104), in hex.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from .errors import ConfigError
from .home import home

__all__ = ["KEY_FILE", "SIGNATURE_CHARS", "sign", "signing_key", "verify"]

KEY_FILE = "signing-key"
SIGNATURE_CHARS = 32


def signing_key(file: str | None = None) -> bytes:
    """The key in `file`, or in `$TRAINSPAN_HOME/signing-key`, which is made with mode 0600 if it is not there.

    Raises ConfigError if the file cannot be read, is readable by others, or is empty.
    """
    path = Path(file) if file else home() / KEY_FILE
    try:
        return _read(path)
    except FileNotFoundError as error:
        if file:
            raise ConfigError(f"signing key {path} does not exist: copy the one of the other machine there") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(secrets.token_hex(32) + "\n")
    try:
        os.link(temporary, path)  # whole or not at all, and never over another process's
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return _read(path)


def sign(key: bytes, text: str) -> str:
    """The signature of `text`: 32 hex digits."""
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()[:SIGNATURE_CHARS]


def verify(key: bytes, text: str, signature: str | None) -> bool:
    """Whether `signature` is that of `text`, in a time that does not depend on it."""
    return hmac.compare_digest(sign(key, text).encode(), (signature or "").encode(errors="surrogatepass"))


def _read(path: Path) -> bytes:
    """Raises FileNotFoundError, ConfigError."""
    try:
        mode, key = path.stat().st_mode, path.read_bytes().strip()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"signing key {path} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"signing key {path} can be read by others: chmod 600 {path}")
    if len(key) < SIGNATURE_CHARS:
        raise ConfigError(
            f"signing key {path} is shorter than {SIGNATURE_CHARS} characters: delete it to have a new one made"
        )
    return key

"""The runner's signature on what it passes to agents: a rollout's identity, and the trace in a base URL.

A policy server that has the runner's key can distinguish an identity from the runner from one that a caller made up. The
signature is the first half of an HMAC-SHA256 (RFC 2104), in hex.
"""

import hashlib
import hmac
import secrets
from pathlib import Path

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.files.secret_files import check_is_private, make_secret_file
from trainspan_schemas.home import home

__all__ = ["KEY_FILE", "SIGNATURE_CHARS", "sign", "signing_key", "verify"]

KEY_FILE = "signing-key"
SIGNATURE_CHARS = 32


def signing_key(file: str | None = None) -> bytes:
    """The key in `file`, or in `$TRAINSPAN_HOME/signing-key`, which is created with mode 0600 if it does not exist.

    Raises ConfigError if the file cannot be read, is readable by others, or is empty.
    """
    path = Path(file) if file else home() / KEY_FILE
    try:
        return _read(path)
    except FileNotFoundError as error:
        if file:
            raise ConfigError(f"signing key {path} does not exist: copy the other machine's key there") from error
    make_secret_file(path, secrets.token_hex(32) + "\n")
    return _read(path)


def sign(key: bytes, text: str) -> str:
    """The signature of `text`: 32 hex digits."""
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()[:SIGNATURE_CHARS]


def verify(key: bytes, text: str, signature: str | None) -> bool:
    """Whether `signature` is the signature of `text`, in constant time."""
    return hmac.compare_digest(sign(key, text).encode(), (signature or "").encode(errors="surrogatepass"))


def _read(path: Path) -> bytes:
    """Reads the key. Raises FileNotFoundError, ConfigError."""
    try:
        check_is_private(path, "signing key")
        key = path.read_bytes().strip()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"signing key {path} cannot be read: {error.strerror}") from error
    if len(key) < SIGNATURE_CHARS:
        raise ConfigError(
            f"signing key {path} is shorter than {SIGNATURE_CHARS} characters: delete it, and a new one is created"
        )
    return key

"""Several collectors: all data of a rollout goes to one of them, and every sender chooses the same.

Rendezvous hashing (Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates"): a collector's weight for
a key is the first 8 bytes of SHA-256 of `HOST:PORT key`, as a big-endian number, and the heaviest collector gets the key. A
further collector takes its share of the keys from all others, and no key moves between those.
"""

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from trainspan_schemas.errors import ConfigError

__all__ = ["ENV_COLLECTORS", "Collectors", "address_of"]

ENV_COLLECTORS = "TRAINSPAN_COLLECTORS"
"""The variable that lists the collectors for an agent's process with several rollouts."""
_OTLP_PORT = 4317


@dataclass(frozen=True, slots=True)
class Collectors:
    """The OTLP/gRPC URLs of all collectors. The order does not matter; `of` gives all senders the same URLs."""

    urls: tuple[str, ...]

    @classmethod
    def of(cls, urls: str | Iterable[str]) -> "Collectors":
        """Several URLs, or one text with commas, each as `http://HOST:PORT` or `https://HOST:PORT`.

        Hosts become lower case. Without a port it is 4317; `grpc://` and no scheme are `http://`. Raises ConfigError if one is
        not a URL, or is there twice.
        """
        words = [word.strip() for word in (urls.split(",") if isinstance(urls, str) else urls) if word.strip()]
        addresses = [address_of(word) for word in words]
        if not words:
            raise ConfigError("no collector is named: start `trainspan collector`, or set [collector] endpoints")
        if len(set(addresses)) < len(words):
            raise ConfigError(f"a collector is named twice: {', '.join(words)}")
        return cls(tuple(f"{_scheme(word)}://{address}" for word, address in zip(words, addresses, strict=True)))

    def url_for(self, key: str) -> str:
        """The collector of a rollout id, or of the trace id of data without a rollout."""
        if len(self.urls) == 1:
            return self.urls[0]
        return max(self.urls, key=lambda url: (_weight(address_of(url), key), url))

    def __str__(self) -> str:
        return ",".join(self.urls)


@functools.lru_cache(maxsize=256)
def address_of(url: str) -> str:
    """`HOST:PORT` of a URL in lower case; the port is 4317 if none is given. Raises ConfigError if it is not a URL."""
    fault = ConfigError(f"collector {url!r} is not a URL: write http://HOST:PORT")
    try:
        parts = _split(url)
        host, port = parts.hostname, parts.port or _OTLP_PORT
    except ValueError:
        raise fault from None
    if not host or parts.scheme not in ("", "http", "https", "grpc"):
        raise fault
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _scheme(url: str) -> str:
    """Senders use TLS for `https`, and for nothing else."""
    return "https" if _split(url).scheme == "https" else "http"


def _split(url: str) -> SplitResult:
    return urlsplit(url if "//" in url else f"//{url}")


def _weight(address: str, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{address} {key}".encode(errors="replace")).digest()[:8])

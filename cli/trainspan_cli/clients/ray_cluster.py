"""The connection to a Ray cluster."""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.config.agents import RaySettings
from trainspan_schemas.errors import ConfigError, ProcessError
from trainspan_schemas.home import home

__all__ = ["ray_cluster", "runtime_env"]

CONNECT_TIMEOUT_S: Final = 10.0
_NEVER_COPIED: Final = (".git", ".venv", "__pycache__")


@contextlib.contextmanager
def ray_cluster(settings: RaySettings, secrets: Sequence[str | None] = ()) -> Iterator[None]:
    """Connects this process to the cluster, with the runtime environment of the settings.

    `secrets` are files that are not copied to the nodes. Raises ConfigError, or ProcessError if there is no cluster.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError("the engine ray needs ray: pip install 'trainspan[ray]', on each node as well") from error
    environment = runtime_env(settings, secrets)
    address = settings.address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_answers(address)
    try:
        ray.init(address, runtime_env=environment, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_connection(address, error) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raises ConfigError if the address is not HOST:PORT, ProcessError if nothing listens there.

    Ray itself would wait for minutes.
    """
    if address == "auto":
        return
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or "/" in host:
        raise ConfigError(f"[ray] address = {address!r}: write HOST:PORT, and run the command on a node of the cluster")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _no_connection(address, error) from error


def _no_connection(address: str, error: Exception) -> ProcessError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ProcessError(
        f"no connection to the Ray cluster {address}: {first}; start a node of it here with ray start, or set [ray] address"
    )


def runtime_env(settings: RaySettings, secrets: Sequence[str | None] = ()) -> dict[str, Any]:
    """Ray's runtime environment for the settings. Raises ConfigError if the file or the folder is missing or invalid."""
    found: dict[str, Any] = {}
    if settings.runtime_env:
        try:
            found = json.loads(Path(settings.runtime_env).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"[ray] runtime_env = {settings.runtime_env!r}: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"[ray] runtime_env = {settings.runtime_env!r}: not a JSON object")
    if settings.working_dir:
        folder = Path(settings.working_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"[ray] working_dir = {settings.working_dir!r}: no such folder")
        found["working_dir"] = str(folder)
        found["excludes"] = [*found.get("excludes", ()), *_NEVER_COPIED, *_within(folder, secrets)]
    return found


def _within(folder: Path, secrets: Sequence[str | None]) -> list[str]:
    """The state folder and the given files as patterns like those of `.gitignore`, if they are in the folder."""
    paths = [home(), *(Path(name) for name in secrets if name)]
    return [
        f"/{path.resolve().relative_to(folder).as_posix()}" for path in paths if path.resolve().is_relative_to(folder)
    ]

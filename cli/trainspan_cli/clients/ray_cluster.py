"""The connection to a Ray cluster."""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainspan_cli.clients.working_dir import excluded_patterns
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, ProcessError, pip_install
from trainspan_schemas.files.durable import JsonObject

if TYPE_CHECKING:
    from trainspan_rollouts import RunSettings

__all__ = ["ray_cluster", "rollout_engine", "runtime_env"]

CONNECT_TIMEOUT_S: Final = 10.0


@contextlib.contextmanager
def ray_cluster(settings: Settings, secrets: Iterable[str | Path | None] = ()) -> Iterator[None]:
    """Connects this process to the cluster, with the runtime environment of `[ray]`.

    `secrets` are files that are not copied to the nodes, in addition to those of the settings. Raises ConfigError, or
    ProcessError if there is no cluster.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"the engine ray needs ray: {pip_install('ray')}, on each node as well") from error
    environment = runtime_env(settings, secrets)
    address = settings.ray.address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_answers(address)
    try:
        ray.init(address, runtime_env=environment, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_connection(address, error) from error
    try:
        yield
    finally:
        ray.shutdown()


def rollout_engine(
    wanted: "RunSettings", settings: Settings, task_files: Iterable[Path]
) -> contextlib.AbstractContextManager[None]:
    """The connection to what executes the agents of a run; `task_files` are not copied to other machines.

    Raises as `ray_cluster` does.
    """
    if wanted.engine != "ray":
        return contextlib.nullcontext()
    return ray_cluster(settings, (*task_files, wanted.token_file))


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


def runtime_env(settings: Settings, secrets: Iterable[str | Path | None] = ()) -> JsonObject:
    """Ray's runtime environment for the settings. Raises ConfigError if the file or the folder is missing or invalid."""
    environment: JsonObject = {}
    ray = settings.ray
    if ray.runtime_env:
        try:
            environment = json.loads(Path(ray.runtime_env).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"[ray] runtime_env = {ray.runtime_env!r}: {error}") from error
        if not isinstance(environment, dict):
            raise ConfigError(f"[ray] runtime_env = {ray.runtime_env!r}: not a JSON object")
    if ray.working_dir:
        folder = Path(ray.working_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"[ray] working_dir = {ray.working_dir!r}: no such folder")
        environment["working_dir"] = str(folder)
        environment["excludes"] = [*environment.get("excludes", ()), *excluded_patterns(folder, settings, secrets)]
    return environment

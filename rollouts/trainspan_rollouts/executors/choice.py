"""Chooses the executor of a run."""

import logging
import os
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from trainspan_rollouts.executors.executor import AgentSpec, Executor
from trainspan_rollouts.executors.local import local_executor
from trainspan_rollouts.executors.ray_executor import RayExecutor
from trainspan_rollouts.harnesses.connection import Connection, read_connection
from trainspan_rollouts.records import RunSettings
from trainspan_schemas.agents.functions import is_function_name
from trainspan_schemas.errors import ConfigError, UsageError
from trainspan_schemas.home import store_path
from trainspan_schemas.store.access import running_collector
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.store.endpoint import headers_of, is_this_machine
from trainspan_schemas.store.roles import Role
from trainspan_schemas.store.senders import sender_headers

__all__ = ["choose_executor"]

_log = logging.getLogger(__name__)


def choose_executor(settings: RunSettings, secrets: Collection[str] = ()) -> Executor:
    """Returns the executor for engine and target, whose agents do not get the variables named in `secrets`.

    Raises UsageError if a setting is invalid.
    """
    harness = read_connection(settings.harness) if settings.harness else None
    _check(settings, harness)
    collectors = Collectors.of(settings.collector)
    headers = {_agent_headers(settings, url) for url in collectors.urls}
    if len(headers) > 1:
        raise ConfigError(f"an agent has one token for all collectors ({collectors}): give --token-file")
    workers = 1 if settings.engine == "ray" else min(settings.workers or 1, settings.concurrency)
    spec = AgentSpec(
        settings.target,
        settings.policy_url,
        collectors,
        settings.timeout_s,
        workers,
        settings.python,
        harness,
        settings.workspace and _absolute(settings.workspace),
        settings.keep_workspaces and str(Path(settings.keep_workspaces).resolve()),
        settings.stdin or (harness.stdin if harness else "task"),
        {url: _otlp_http(url, settings.store) for url in collectors.urls},
    )
    if settings.engine == "ray":
        return RayExecutor(
            spec, headers.pop(), settings.concurrency, settings.workers, settings.ray, settings.shard.count
        )
    environ = {name: value for name, value in os.environ.items() if name not in secrets}
    return local_executor(spec, environ, headers.pop())


def _check(settings: RunSettings, harness: Connection | None) -> None:
    if not settings.target and harness is None:
        raise UsageError("no agent to run: name module:function, a command after --, or a harness with --harness")
    if harness is not None and len(settings.target) == 1 and is_function_name(settings.target[0]):
        raise UsageError(f"two agents: the harness {harness.name} and the function {settings.target[0]}; name one")
    for name in ("workspace", "keep_workspaces"):
        if harness is None and getattr(settings, name):
            raise UsageError(f"{name} = {getattr(settings, name)}: it is for a harness (--harness)")
    for name in ("n", "concurrency", "workers", "judge_concurrency"):
        if (value := getattr(settings, name)) is not None and value < 1:
            raise UsageError(f"{name} = {value}: it must be at least 1")
    for name in ("timeout_s", "judge_timeout_s"):
        if not getattr(settings, name) > 0:
            raise UsageError(f"{name} = {getattr(settings, name):g}: it must be positive")
    if settings.retries < 0:
        raise UsageError(f"retries = {settings.retries}: it must not be negative")


def _absolute(template: str) -> str:
    """A template that is a folder here, with its whole path: a worker may run elsewhere."""
    return str(Path(template).resolve()) if Path(template).is_dir() else template


def _otlp_http(url: str, store: str | None) -> str:
    """The OTLP/HTTP URL of the collector at a gRPC URL: as this machine's collector says, else at the next port, as 4318 is to 4317."""
    parts = urlsplit(url)
    host, port = url.rpartition(":")[0], (parts.port or 4317) + 1
    running = running_collector(store_path(store))
    if running and running.http and running.grpc and is_this_machine(url) and running.grpc.endswith(f":{parts.port}"):
        port = int(running.http.rpartition(":")[2])
    return f"{host}:{port}"


def _agent_headers(settings: RunSettings, collector: str) -> str:
    """Returns headers with the agent's token, if there is one; a local collector without a token file needs none.

    Raises ConfigError if `token_file` lacks the agent's token.
    """
    try:
        headers = sender_headers(Role.AGENT, collector, {}, token_file=settings.token_file, store=settings.store)
    except ConfigError:
        if settings.token_file:
            raise
        headers = None
    if headers is None and "authorization" in headers_of(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")):
        _log.warning(
            "event=agents_without_token collector=%s: OTEL_EXPORTER_OTLP_HEADERS is the runner's and not passed to agents; "
            "give --token-file a file with lines for runner and agent",
            collector,
        )
    return headers or ""

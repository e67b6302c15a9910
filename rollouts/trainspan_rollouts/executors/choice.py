"""Chooses the executor for a target."""

import logging
import os
import sys
from collections.abc import Sequence

from trainspan_rollouts.executors.command_executor import CommandExecutor, agent_environment
from trainspan_rollouts.executors.executor import Executor
from trainspan_rollouts.executors.function_executor import WorkerPool
from trainspan_rollouts.records import RunSettings
from trainspan_schemas.agents.functions import is_function_name
from trainspan_schemas.errors import ConfigError, UsageError
from trainspan_schemas.store.collectors import ENV_COLLECTORS, Collectors
from trainspan_schemas.store.endpoint import headers_of
from trainspan_schemas.store.roles import Role
from trainspan_schemas.store.senders import sender_headers

__all__ = ["choose_executor"]

_log = logging.getLogger(__name__)


def choose_executor(settings: RunSettings) -> Executor:
    """Returns the executor for the target. Raises UsageError if a setting is invalid."""
    for name in ("n", "concurrency", "workers", "judge_concurrency"):
        if getattr(settings, name) < 1:
            raise UsageError(f"{name} = {getattr(settings, name)}: it must be at least 1")
    for name in ("timeout_s", "judge_timeout_s"):
        if not getattr(settings, name) > 0:
            raise UsageError(f"{name} = {getattr(settings, name):g}: it must be positive")
    if settings.retries < 0:
        raise UsageError(f"retries = {settings.retries}: it must not be negative")
    collectors = Collectors.of(settings.collector)
    headers = {url: _agent_headers(settings, url) for url in collectors.urls}
    if len(set(headers.values())) > 1:
        raise ConfigError(f"an agent has one token for all collectors ({collectors}): give --token-file")
    environ = agent_environment(os.environ, settings.policy_url, collectors.urls[0], headers[collectors.urls[0]])
    if _is_function(settings.target):
        workers = min(settings.workers, settings.concurrency)
        python = settings.python or sys.executable
        if len(collectors.urls) > 1:  # for a process of many rollouts
            environ[ENV_COLLECTORS] = str(collectors)
        return WorkerPool(settings.target[0], workers, settings.timeout_s, environ, python)
    return CommandExecutor(settings.target, settings.policy_url, collectors, settings.timeout_s, environ)


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


def _is_function(target: Sequence[str]) -> bool:
    """Whether the target is `module:function`, not a command. Raises UsageError if it is empty."""
    if not target:
        raise UsageError("no agent to run: name module:function, or a command after --")
    return len(target) == 1 and is_function_name(target[0])

"""Executes agents on a node of a Ray cluster: the class of the actors that `ray_executor` starts."""

import asyncio
import os
from dataclasses import replace
from urllib.parse import urlsplit

from trainspan_rollouts.executors.executor import AgentSpec, Ended, Execution, Executor
from trainspan_rollouts.executors.local import local_executor

__all__ = ["RayWorker"]

CONNECT_TIMEOUT_S = 5.0


class RayWorker:
    """Executes agents as a run on this machine would, until the actor's process ends."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        self._executor: Executor | None = None

    async def start(self, otlp_headers: str) -> tuple[str, list[str]]:
        """Gets ready; returns the node's address, and the URLs that do not answer there.

        Agents get the environment of the node without Ray's own variables. The headers hold the agent's token: they come
        in a call, because Ray keeps the arguments of an actor's constructor in the head's memory. Raises UsageError or
        ProcessError if the target cannot be used.
        """
        from ray.util import get_node_ip_address

        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_") and name != "PYTHONBREAKPOINT"
        }
        self._executor = local_executor(self._spec, environ, otlp_headers, is_replaceable=True)
        await self._executor.start()
        urls = (self._spec.policy_url, *self._spec.collectors.urls)
        answers = await asyncio.gather(*(_answers(url) for url in urls))
        return get_node_ip_address(), [url for url, answer in zip(urls, answers, strict=True) if not answer]

    async def execute(self, execution: Execution) -> Ended:
        assert self._executor is not None
        try:
            ended = await self._executor.execute(execution)
        finally:
            await self._executor.release(execution)
        return ended if self._spec.keep_workspaces else replace(ended, workdir=None)

    async def stay(self) -> None:
        """Returns never: a caller learns that the process has ended."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        if self._executor is not None:
            await self._executor.close()


async def _answers(url: str) -> bool:
    """Whether the URL's port accepts connections; one without a port is not tried."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    if parts.port is None:
        return True
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, parts.port), CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True

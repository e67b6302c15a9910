"""Makes the executor for a target on this machine."""

import sys
from collections.abc import Mapping

from trainspan_rollouts.executors.command_executor import CommandExecutor, agent_environment
from trainspan_rollouts.executors.executor import AgentSpec, Executor
from trainspan_rollouts.executors.function_executor import WorkerPool
from trainspan_rollouts.harnesses.harness import Harness
from trainspan_rollouts.harnesses.workspaces import Workspaces
from trainspan_schemas.agents.functions import is_function_name
from trainspan_schemas.store.collectors import ENV_COLLECTORS

__all__ = ["local_executor"]


def local_executor(
    spec: AgentSpec, environ: Mapping[str, str], otlp_headers: str, *, is_replaceable: bool = False
) -> Executor:
    """Returns the executor; its agents get `environ` without the runner's settings, and send with `otlp_headers`.

    One that `is_replaceable` raises ProcessError or UsageError when it can start no more agents.
    """
    prepared = agent_environment(
        environ, spec.policy_url, spec.collectors.urls, otlp_headers, is_instrumented=spec.harness is None
    )
    if spec.harness is not None:
        harness = Harness(spec.harness, spec.target, Workspaces(spec.workspace))
        return CommandExecutor(spec, prepared, harness)
    if len(spec.target) == 1 and is_function_name(spec.target[0]):
        if len(spec.collectors.urls) > 1:  # for a process of many rollouts
            prepared[ENV_COLLECTORS] = str(spec.collectors)
        python = spec.python or sys.executable
        return WorkerPool(spec.target[0], spec.workers, spec.timeout_s, prepared, python, is_replaceable=is_replaceable)
    return CommandExecutor(spec, prepared)

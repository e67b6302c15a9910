"""Policy servers that others started: the settings that do not go with them, and the version that they must serve."""

import time
from collections.abc import Sequence
from pathlib import Path

from trainspan_cli.clients.policy_server import served
from trainspan_cli.clients.policy_servers import PolicyServers
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, read_latest
from trainspan_schemas.config.policy_scope import Policy
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, ProcessError
from trainspan_schemas.home import policy_dir
from trainspan_training.checkpoints.swap_request import PolicyAddress, publish_to_one

__all__ = ["bring_up_to_date", "check_external", "wait_for_servers"]


def check_external(settings: Settings) -> None:
    """Raises ConfigError for settings of a policy server that the loop would have to start itself."""
    if not settings.rollouts.policy_servers:
        return
    own = {
        "[serving] sleep": settings.serving.sleep,
        "[loop] server_flags": settings.loop.server_flags,
        "[loop] server_devices": settings.loop.server_devices,
    }
    for name, value in own.items():
        if value:
            raise ConfigError(f"{name} has no effect with [rollouts] policy_servers: the loop does not start them")


def wait_for_servers(servers: PolicyServers, timeout_s: float) -> None:
    """Waits until one of them is ready. Raises ProcessError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not servers.is_healthy():
        if time.monotonic() > deadline:
            raise ProcessError(
                f"no policy server was ready after {timeout_s:.0f} s: {servers.url} ([rollouts] policy_servers)"
            )
        time.sleep(0.5)


def bring_up_to_date(servers: PolicyServers, checkpoints: Path, policies: Sequence[Policy], timeout_s: float) -> None:
    """Swaps the run's newest checkpoints in at each server that answers, unless it serves them already.

    Raises ConfigError if the run has none yet and a server serves a checkpoint of another run, ProcessError if a swap fails.
    """
    for url, state in servers.states().items():
        for policy in policies:
            version = served(state, policy)["version"]
            latest = read_latest(policy_dir(checkpoints, policy))
            if latest is None:
                if version:
                    raise ConfigError(
                        f"the policy server at {url} serves version {version} of another run: restart it with the model that "
                        "this run starts from"
                    )
                continue
            newest = CheckpointMeta.read(latest).version
            if version != newest:
                address = PolicyAddress(url, policy)
                swap = publish_to_one(address, latest.name, newest, retry_for_s=timeout_s, was_there=True)
                if swap.outcome != "swapped":
                    raise ProcessError(f"the policy server at {url} does not take {latest.name}: {swap.error}")

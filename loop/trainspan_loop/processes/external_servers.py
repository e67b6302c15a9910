"""Policy servers that others started: the settings that do not go with them, and the version that they must serve."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainspan_loop.clients.policy_servers import PolicyServers
from trainspan_schemas.artifacts.checkpoint import META_FILE, CheckpointMeta, base_digest, read_latest
from trainspan_schemas.config.policy_scope import Policy
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, ProcessError
from trainspan_schemas.home import policy_dir
from trainspan_schemas.policy_server import Offer, PolicyInService, ServerState
from trainspan_training.checkpoints.published import publish_files, tolerated
from trainspan_training.checkpoints.swap_request import PolicyAddress, publish_to_one

__all__ = ["bring_up_to_date", "check_external", "level", "wait_for_servers"]


def check_external(settings: Settings) -> None:
    """Raises ConfigError for settings of a policy server that the loop would have to start itself."""
    if not settings.rollouts.policy_servers:
        return
    if settings.train.checkpoints_url is None:
        raise ConfigError(
            "[rollouts] policy_servers needs [train] checkpoints_url, such as s3://BUCKET/PREFIX or file:///SHARED/FOLDER: "
            "the servers copy checkpoints from there ([serving] checkpoints_url)"
        )
    local_only = {
        "[serving] sleep": settings.serving.sleep,
        "[loop] server_flags": settings.loop.server_flags,
        "[loop] server_devices": settings.loop.server_devices,
    }
    for name, value in local_only.items():
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


def bring_up_to_date(
    servers: PolicyServers, checkpoints: Path, model: str, policies: Sequence[PolicyAddress], timeout_s: float
) -> list[str]:
    """Swaps the run's newest checkpoints in at each server that answers, unless it serves them; returns what did not work.

    Raises ConfigError if a server has another model than the run, whose first is `model`, StorageError if a checkpoint cannot
    be published, and ProcessError if no server takes it. One that its canary refuses is left to the trainer, which sets it aside.
    """
    troubles: list[str] = []
    states = servers.states()
    for address in policies:
        policy = address.policy
        latest = read_latest(policy_dir(checkpoints, policy))
        version, digest = _identity(latest or Path(model))
        took = 0
        if latest is not None:
            publish_files(latest, address)
        for url, state in states.items():
            served = _served(url, state, policy)
            if digest and served.base_digest not in (None, digest):
                raise ConfigError(
                    f"the policy server at {url} has another model than the run: restart it with {model} "
                    f"(digest {digest}, not {served.base_digest})"
                )
            if latest is None:
                if served.version != version:
                    raise ConfigError(
                        f"the policy server at {url} serves version {served.version}, which is not of this run: restart it "
                        f"with the model that the run starts from, version {version}"
                    )
                continue
            # Another run's checkpoint of the same name would have the same version: only a swap shows whose it is.
            swap = publish_to_one(replace(address, url=url), Offer.of(latest), retry_for_s=timeout_s, was_there=True)
            took += swap.outcome in ("swapped", "refused")
            if swap.outcome != "swapped":
                troubles.append(f"the policy server at {url} does not take {latest.name}: {swap.error}")
        if latest is not None and not took:
            raise ProcessError("; ".join(troubles))
    return troubles


def level(servers: PolicyServers, checkpoints: Path, policies: Sequence[PolicyAddress], timeout_s: float) -> list[str]:
    """Swaps the newest checkpoints in at servers with others, such as one that was away during a swap.

    Returns what did not work. Raises PolicyServerError if no server answers.
    """
    troubles: list[str] = []
    for address in policies:
        latest = read_latest(policy_dir(checkpoints, address.policy))
        if latest is None:
            continue
        with tolerated():
            publish_files(latest, address)
        offer = Offer.of(latest)
        for url, state in servers.states().items():
            if not _served(url, state, address.policy).serves(offer):
                swap = publish_to_one(replace(address, url=url), offer, retry_for_s=timeout_s, was_there=True)
                if swap.outcome != "swapped":
                    troubles.append(f"the policy server at {url} does not take {latest.name}: {swap.error}")
    return troubles


def _identity(folder: Path) -> tuple[int, str | None]:
    """Version of a model or checkpoint, and the digest of the model that training began with; None if it is not here."""
    if not folder.is_dir():
        return 0, None
    version = CheckpointMeta.read(folder).version if (folder / META_FILE).is_file() else 0
    return version, base_digest(folder)


def _served(url: str, state: ServerState, policy: Policy) -> PolicyInService:
    try:
        return state.of(policy)
    except KeyError:
        raise ConfigError(
            f"the policy server at {url} has no policy {policy}: start it with the same [policies] as the loop"
        ) from None

"""`trainspan swap`."""

import json
import sys
from typing import Annotated

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, Format, FormatOption, PolicyOption, settings
from trainspan_loop.addresses import policy_servers_of
from trainspan_schemas.artifacts.run_files import RunFiles
from trainspan_schemas.config.load import override
from trainspan_schemas.config.policy_scope import scoped
from trainspan_schemas.home import checkpoints_dir, policy_dir, runs_dir

__all__ = ["swap"]


@setting_options("train", "checkpoints", "policy_url", "publish_timeout_s")
def swap(
    *,
    version: Annotated[int, typer.Argument(help="The policy version to put back in service.")],
    policy: PolicyOption = None,
    given: Given,
    config: ConfigOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Put an earlier version of the policy back in service; the trainer continues from it.

    Newer versions are withdrawn: neither the trainer nor a restarted policy server continues from them. The same command with
    one of their numbers takes it back. Without --checkpoints, and if a loop is running, its newest run is meant.
    The exit code is 1 if one of several servers did not take it.

    Example: trainspan swap 3
    """
    from trainspan_training.checkpoints.rollback import roll_back
    from trainspan_training.checkpoints.swap_request import PolicyAddress

    loaded = scoped(settings(config), policy)
    chosen = override(loaded.train, **given)
    checkpoints, policy_url = checkpoints_dir(chosen.checkpoints), chosen.policy_url
    if chosen.checkpoints is None and (run := _running_loop()) is not None:
        checkpoints = run.checkpoints
        policy_url = given.get("policy_url") or ",".join(policy_servers_of(loaded))
    address = PolicyAddress(policy_url, policy, chosen.checkpoints_url)
    done = roll_back(policy_dir(checkpoints, policy), version, address, retry_for_s=chosen.publish_timeout_s)
    canary = (done.swap.answer or {}).get("canary") or {}
    left_out = done.swap.left_out
    if format == "json":
        outcome = {"checkpoint": done.checkpoint, "withdrawn": done.withdrawn, "canary": canary, "left_out": left_out}
        print(json.dumps(outcome))
    else:
        took = [server.base for server in address.servers if server.base not in left_out]
        where = f" at {', '.join(took)}" if done.swap.outcome == "swapped" else ""
        whose = f" as policy {policy}" if policy else ""
        print(f"{done.checkpoint} is in service{whose}{where}" + (f", canary {canary['status']}" if canary else ""))
        if done.withdrawn:
            print(f"withdrawn: {', '.join(done.withdrawn)}")
    for server, error in left_out.items():
        print(f"trainspan: {server} did not take it, repeat the command: {error}", file=sys.stderr)
    if left_out:
        raise typer.Exit(1)


def _running_loop() -> RunFiles | None:
    """The newest run that a loop is working on."""
    runs = (RunFiles(path.parent) for path in sorted(runs_dir().glob("*/run.json"), reverse=True))
    return next((run for run in runs if run.is_held()), None)

"""Settings of work that is distributed over several machines."""

from dataclasses import dataclass

__all__ = ["RaySettings"]


@dataclass(frozen=True, slots=True)
class RaySettings:
    """`[ray]`: the Ray cluster of commands that run with the engine `ray`."""

    address: str | None = None
    """HOST:PORT of the cluster's head; default: RAY_ADDRESS, otherwise the cluster that this machine is a node of.

    The command itself runs on a node of the cluster."""
    working_dir: str | None = None
    """Folder with the agent's code, copied to the nodes, where agents run in it; default: the nodes have the code.

    The state folder, the files of keys and tokens, and the task file are not copied."""
    runtime_env: str | None = None
    """JSON file with further fields of Ray's runtime environment, such as `pip` or `env_vars`; default: none.

    Ray shows these fields in its dashboard and logs: they are no place for secrets."""
    worker_cpus: float = 1.0
    """CPUs that each worker reserves on its node."""
    worker_resource: str | None = None
    """Custom resource of the nodes that may run agents, as in `ray start --resources`; default: any node."""
    start_timeout_s: float = 120.0
    """How long the run waits for a worker if the cluster has room for none."""

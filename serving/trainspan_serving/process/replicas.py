"""Refuses data parallelism inside vLLM: of several engines, a swap would get the result of the first one only.

vLLM calls all engines to load weights but returns one result, and distributes the canary's requests among them: an
engine that kept the earlier weights would go unnoticed.
"""

from collections.abc import Mapping, Sequence

from trainspan_schemas.errors import ConfigError
from trainspan_serving.process.device import last_value

__all__ = ["refuse_replicas", "replicas_of"]

_VARIABLE = "VLLM_DP_SIZE"


def refuse_replicas(size: int, said_by: str) -> None:
    """Raises ConfigError if there is more than one engine."""
    if size > 1:
        raise ConfigError(
            f"{said_by} asks for {size} engines, but a swap can be verified on one only: start one policy server per "
            "engine, or split the model with --tensor-parallel-size"
        )


def replicas_of(flags: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Returns how many engines vLLM's flags or the environment ask for, and which one does; 1 for an invalid number, which vLLM
    itself reports. What a `--config` file asks for is in vLLM's own arguments (see plan_of_process)."""
    flagged = last_value(flags, "--data-parallel-size") or last_value(flags, "-dp")
    size, said_by = (flagged, "--data-parallel-size") if flagged else (environ.get(_VARIABLE, "1"), _VARIABLE)
    return int(size) if size.isdigit() else 1, said_by

"""What a server process is told: settings that are fixed for its life, handed to it as JSON in its environment."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

__all__ = ["PLAN_VARIABLE", "ServerPlan"]

PLAN_VARIABLE = "TRAINSPAN_SERVER_PLAN"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Everything that our code inside the vLLM process needs."""

    model: str
    """Folder (or Hugging Face id) whose weights are served at start."""
    version: int
    served_name: str
    checkpoints: str
    host: str
    collector: str | None
    """OTLP/gRPC URL; None: calls are counted, not sent."""
    otlp_headers: str
    """As in OTEL_EXPORTER_OTLP_HEADERS."""
    token: str
    """Bearer token of the swap."""
    train_sampling: bool
    swap_timeout_s: float
    drain_timeout_s: float
    canary_tolerance: float | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "ServerPlan":
        """Raises KeyError where no plan is set: the process was not started by `trainspan serve`."""
        return cls(**json.loads(environ[PLAN_VARIABLE]))

    def serving(self, model: str, version: int) -> "ServerPlan":
        """The same plan from other weights."""
        return replace(self, model=model, version=version)

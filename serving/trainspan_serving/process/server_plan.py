"""The settings of a server process, fixed for its lifetime and passed as JSON in its environment.

A vLLM that was started by hand with our `--middleware` has no such JSON: its plan is built from its own arguments and
the settings that `trainspan serve` would read.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainspan_schemas.artifacts.checkpoint import META_FILE, CheckpointMeta, read_latest
from trainspan_schemas.config.load import load_settings, override
from trainspan_schemas.config.policies import agents_of_policies
from trainspan_schemas.config.settings import ServingSettings
from trainspan_schemas.errors import CheckpointError, ConfigError
from trainspan_schemas.home import checkpoints_dir, home, token
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.store.roles import Role, token_of
from trainspan_schemas.store.senders import sender_headers, token_advice
from trainspan_serving.checkpoints.adapters import is_adapter
from trainspan_serving.process.replicas import refuse_replicas, replicas_of

__all__ = ["PLAN_VARIABLE", "PolicyPlan", "ServerPlan", "make_plan", "plan_of_process", "plan_policies", "version_of"]

PLAN_VARIABLE = "TRAINSPAN_SERVER_PLAN"


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """One of several policies on the full weights."""

    agents: tuple[str, ...]
    """Names of the agents whose calls it answers."""
    adapter: str | None
    """Folder of its LoRA adapter at start; None: the full weights alone."""
    version: int


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """All settings of our code inside the vLLM process."""

    settings: ServingSettings
    """`[serving]` with absolute paths; of its `model`, the fields below say what is served."""
    model: str
    """Folder (or Hugging Face id) of the full weights at start."""
    adapter: str | None
    """Folder of the LoRA adapter on them at start."""
    version: int
    state: str
    """Folder for state that outlives the process: spool and call numbers."""
    otlp_headers: str
    """As in OTEL_EXPORTER_OTLP_HEADERS; used if no token is found."""
    store: str | None
    """The collector's store; a file next to it lists the tokens it requires. None: the default store."""
    otlp_certificate: str | None
    """As in OTEL_EXPORTER_OTLP_CERTIFICATE."""
    token: str
    """Bearer token of the swap."""
    policies: dict[str, PolicyPlan]
    """Policies that are served side by side, by name; empty: only one."""

    @classmethod
    def from_json(cls, text: str) -> "ServerPlan":
        values = json.loads(text)
        policies = {
            name: PolicyPlan(tuple(policy["agents"]), policy["adapter"], policy["version"])
            for name, policy in values.pop("policies").items()
        }
        return cls(ServingSettings(**values.pop("settings")), **values, policies=policies)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def collectors(self) -> Collectors | None:
        """Where call spans go; None: calls are counted, not sent."""
        return None if self.settings.collector == "none" else Collectors.of(self.settings.collector)

    @property
    def checkpoints(self) -> Path:
        return checkpoints_dir(self.settings.checkpoints)

    @property
    def temperatures(self) -> dict[str, float]:
        """Split → temperature at which its rollouts are sampled, whatever the client requests."""
        train = {"train": 1.0} if self.settings.train_sampling else {}
        val = self.settings.val_temperature
        return train if val is None else {**train, "val": val}

    def headers_for(self, collector: str) -> str:
        """Returns headers as in OTEL_EXPORTER_OTLP_HEADERS, with the token now in the file. Raises ConfigError."""
        given = {"OTEL_EXPORTER_OTLP_HEADERS": self.otlp_headers}
        headers = sender_headers(Role.SERVING, collector, given, token_file=self.settings.token_file, store=self.store)
        return headers or self.otlp_headers

    def token_advice(self, collector: str) -> str:
        """What to do if the collector refuses the token."""
        given = {"OTEL_EXPORTER_OTLP_HEADERS": self.otlp_headers}
        return token_advice(Role.SERVING, collector, given, token_file=self.settings.token_file, store=self.store)

    def serving(self, policy: str | None, model: str, adapter: str | None, version: int) -> "ServerPlan":
        """Returns this plan with other weights, or with another adapter of one of its policies."""
        if policy is not None:
            policy_plan = replace(self.policies[policy], adapter=adapter, version=version)
            return replace(self, policies={**self.policies, policy: policy_plan})
        return replace(self, model=model, adapter=adapter, version=version)


def make_plan(
    settings: ServingSettings,
    model: str,
    adapter: Path | None,
    version: int,
    port: int,
    environ: Mapping[str, str],
    store: str | None = None,
    policies: Mapping[str, PolicyPlan] | None = None,
) -> ServerPlan:
    """Builds the plan for the given weights; paths become absolute."""
    state = home() / "serving" / f"{quote(settings.served_name, safe='')}-{port}"
    settings = replace(
        settings,
        checkpoints=str(checkpoints_dir(settings.checkpoints).resolve()),
        token_file=_absolute(settings.token_file),
        signing_key_file=_absolute(settings.signing_key_file),
    )
    if settings.token_file:
        token_of(settings.token_file, Role.SERVING)  # a file without this role is refused before vLLM starts
    return ServerPlan(
        settings,
        model=str(Path(model).resolve()) if Path(model).is_dir() else model,
        adapter=str(adapter.resolve()) if adapter else None,
        version=version,
        state=str(state.resolve()),
        otlp_headers=environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""),
        store=_absolute(store),
        otlp_certificate=environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE"),
        token=token(),
        policies=dict(policies or {}),
    )


def _absolute(path: str | None) -> str | None:
    return str(Path(path).resolve()) if path else None


def plan_of_process(args: Any, environ: Mapping[str, str]) -> ServerPlan:
    """Returns the plan of this server process; `args` are vLLM's.

    Raises ConfigError if vLLM is set to run several engines, or several API server processes, each of which would see
    only part of the requests.
    """
    refuse_replicas(getattr(args, "data_parallel_size", 1), "--data-parallel-size")
    refuse_replicas(*replicas_of((), environ))
    if getattr(args, "api_server_count", 1) not in (None, 1):
        raise ConfigError("the trainspan middleware needs one API server: start vLLM with --api-server-count 1")
    if PLAN_VARIABLE in environ:
        return ServerPlan.from_json(environ[PLAN_VARIABLE])
    names = args.served_model_name
    name = names[0] if isinstance(names, list) and names else names or args.model
    loaded = load_settings(None, environ)
    settings = override(
        loaded.serving,
        served_name=name,
        host=args.host or "127.0.0.1",
        sleep=args.enable_sleep_mode,
    )
    version = version_of(Path(args.model))
    policies = plan_policies(agents_of_policies(loaded.policies), checkpoints_dir(settings.checkpoints), version)
    return make_plan(settings, args.model, None, version, args.port, environ, loaded.collector.store, policies)


def plan_policies(agents: Mapping[str, tuple[str, ...]], checkpoints: Path, version: int) -> dict[str, PolicyPlan]:
    """Plans each policy (name → its agents) with its newest checkpoint, or with the full weights, which are `version`.

    Raises CheckpointError.
    """
    plans = {}
    for name, policy_agents in agents.items():
        latest = read_latest(checkpoints / name)
        if latest is not None and not is_adapter(latest):
            raise CheckpointError(f"{latest} has full weights, but policy {name!r} is an adapter: move it away")
        adapter = str(latest.resolve()) if latest else None
        plans[name] = PolicyPlan(policy_agents, adapter, CheckpointMeta.read(latest).version if latest else version)
    return plans


def version_of(folder: Path) -> int:
    """Returns the policy version in a model folder's `trainspan.json`; 0 if it has none."""
    return CheckpointMeta.read(folder).version if (folder / META_FILE).is_file() else 0

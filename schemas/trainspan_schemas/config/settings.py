"""The sections of `trainspan.toml`, each with its settings and their defaults.

The text under a field is its documentation everywhere: `docs/configuration.md` and the help of the commands' options are
generated from it (see `setting_docs`). Its first paragraph is also the option's help; a second one is for the page only.
If a default is None, the first paragraph ends with "; default: WHAT." and names the value that is used instead.
The type of a setting that hardly anybody sets is `Advanced[…]` (see `marks`).

Paths are relative to the working directory unless absolute.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainspan_schemas.config.agents import RaySettings, RolloutsSettings, ServingSettings
from trainspan_schemas.config.collector import CollectorSettings, PortsSettings
from trainspan_schemas.config.dataset import DatasetSettings
from trainspan_schemas.config.loop import LoopSettings, ViewSettings
from trainspan_schemas.config.policies import PolicySettings
from trainspan_schemas.config.training import DEFAULT_LORA_RANK, ModelSettings, SftSettings, TrainSettings

__all__ = [
    "DEFAULT_LORA_RANK",
    "CollectorSettings",
    "DatasetSettings",
    "LoopSettings",
    "ModelSettings",
    "PolicySettings",
    "PortsSettings",
    "RaySettings",
    "RolloutsSettings",
    "ServingSettings",
    "Settings",
    "SftSettings",
    "TrainSettings",
    "ViewSettings",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """All sections of `trainspan.toml`; `sft` and `train` have the settings of `model` too."""

    ports: PortsSettings = field(default_factory=PortsSettings)
    collector: CollectorSettings = field(default_factory=CollectorSettings)
    serving: ServingSettings = field(default_factory=ServingSettings)
    rollouts: RolloutsSettings = field(default_factory=RolloutsSettings)
    ray: RaySettings = field(default_factory=RaySettings)
    dataset: DatasetSettings = field(default_factory=DatasetSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    view: ViewSettings = field(default_factory=ViewSettings)
    policies: Mapping[str, PolicySettings] = field(default_factory=dict)

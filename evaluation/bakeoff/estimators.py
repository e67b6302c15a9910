"""The estimators that are compared: settings of `[dataset]`, with the functions of trainspan that datasets are made with."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import polars as pl

from trainspan_processing.credit.advantages import assign_advantages
from trainspan_processing.credit.plan import make_plan
from trainspan_processing.rewards.air import AIR, air_rules
from trainspan_processing.rewards.names import RewardName
from trainspan_processing.tables import HISTORY
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["AIR_RULES", "ESTIMATORS", "Estimate", "Vine", "advantages_of"]

AIR_RULES: Final = "tool_error=-0.1"
_GROUP: Final = {"baseline": "dr_grpo"}


@dataclass(frozen=True, slots=True)
class Vine:
    """Branches for measured values."""

    m: int
    """From each state."""
    calls: str = "all"
    """As `trainspan branch --calls`."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One estimator."""

    settings: Mapping[str, Any]
    vine: Vine | None = None

    @property
    def dataset(self) -> DatasetSettings:
        return DatasetSettings(**self.settings)


ESTIMATORS: Final[Mapping[str, Estimate]] = {
    "identical, grpo": Estimate({"credit": "identical", "baseline": "grpo"}),
    "identical": Estimate({"credit": "identical", **_GROUP}),
    "return_to_go γ .9": Estimate({"credit": "return_to_go", "gamma": 0.9, "group_over": "turns", **_GROUP}),
    "step": Estimate({"credit": "step", **_GROUP}),
    "gigpo": Estimate({"credit": "gigpo", **_GROUP}),
    "rtmc": Estimate({"credit": "rtmc", **_GROUP}),
    "per_agent": Estimate({"credit": "per_agent", **_GROUP}),
    "identical, air": Estimate({"credit": "identical", "air": AIR_RULES, **_GROUP}),
    "return_to_go, air": Estimate({"credit": "return_to_go", "air": AIR_RULES, **_GROUP}),
    "step, air": Estimate({"credit": "step", "air": AIR_RULES, **_GROUP}),
    "gigpo, air": Estimate({"credit": "gigpo", "air": AIR_RULES, **_GROUP}),
    "per_agent, air": Estimate({"credit": "per_agent", "air": AIR_RULES, **_GROUP}),
    "vine m 1": Estimate({"credit": "vine", **_GROUP}, Vine(1)),
    "vine m 4": Estimate({"credit": "vine", **_GROUP}, Vine(4)),
    "vine m 4, random:.1": Estimate({"credit": "vine", **_GROUP}, Vine(4, "random:.1")),
    "vine m 4, random:.25": Estimate({"credit": "vine", **_GROUP}, Vine(4, "random:.25")),
}
"""Name → estimator. Baselines are `dr_grpo`, so that rules of credit are compared; `identical, grpo` is the default."""


def advantages_of(estimate: Estimate, calls: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """`calls` with `advantage` (0 if `dropped`) and `dropped`, as a dataset of these rollouts would have them.

    `calls` and `rollouts` are the frames of `assign_advantages` for one reward `reward`, with `step:air` and `rollout:air`.
    """
    settings = estimate.dataset
    plan = make_plan(settings, has_tasks=True)
    if air_rules(settings.air):
        plan = replace(plan, rewards=(*plan.rewards, RewardName(AIR, may_be_missing=True)))
    credited = assign_advantages(calls, rollouts, pl.DataFrame(schema=HISTORY), plan).calls
    found = calls.join(credited, on=["rollout", "position"], how="left", maintain_order="left")
    dropped = pl.col("return").is_null() | pl.col("drop").is_not_null()
    return found.with_columns(
        pl.when(dropped).then(0.0).otherwise("advantage").alias("advantage"), dropped.alias("dropped")
    )

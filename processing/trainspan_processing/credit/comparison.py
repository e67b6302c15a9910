"""Compares calls with each other and with rollouts of earlier datasets: centers and scales, as TERMS."""

from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.credit.plan import GIGPO, CreditPlan, Estimator, baseline_of, credit_of
from trainspan_processing.credit.rtmc import RTMC, rtmc_terms
from trainspan_processing.credit.rules import CREDITS
from trainspan_processing.credit.vine import VINE, vine_terms
from trainspan_processing.tables import Schema
from trainspan_schemas.agents.functions import code_digest, is_function_name
from trainspan_schemas.errors import UsageError

__all__ = ["CALL", "Comparison"]

CALL: Final = ["rollout", "position"]
"""The columns that identify a call."""

_FACTS: Final = ["rollout", "group", "run_id", "judge", "end_ns", "rollout_id", "attempt", "is_branch"]
_PARTS: Final[Schema] = {"rollout": pl.UInt32, "part": pl.String, "value": pl.Float64}
_NO_PARTS: Final = pl.DataFrame(schema=_PARTS)
_EVERYTHING: Final = pl.lit(0, dtype=pl.UInt32).alias("pool")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rollouts, history and plan to compare by. Every method returns (terms, parts): see `assign_advantages`."""

    rollouts: pl.DataFrame
    history: pl.DataFrame
    """HISTORY."""
    plan: CreditPlan

    def terms(self, calls: pl.DataFrame, part: str) -> tuple[pl.DataFrame, pl.DataFrame]:
        """TERMS (with `worth`) and parts of `calls` with step_reward and rollout_reward.

        With `per_agent`, each agent's calls, or those of a kind, are credited and compared separately.
        An agent's return is the rollout's own reward plus the rewards of its own calls. Estimators by role: arXiv 2506.24119.
        """
        plan = self.plan
        if not plan.per_agent:
            return self._of_estimator(calls, plan.estimator, part)
        empty = self._of_estimator(calls.clear(), plan.estimator, part)
        results = [empty]
        by_share = plan.with_share(calls).partition_by("share", as_dict=True, include_key=False)
        for (whose,), agent_calls in sorted(by_share.items(), key=lambda item: str(item[0][0])):
            estimator = plan.by_agent.get(str(whose), plan.estimator)
            share = " ".join(filter(None, (part, f"agent:{whose}")))
            results.append(self._of_estimator(agent_calls, estimator, share))
        terms, parts = (pl.concat(frames) for frames in zip(*results, strict=True))
        return terms, parts

    def _of_estimator(self, calls: pl.DataFrame, estimator: Estimator, part: str) -> tuple[pl.DataFrame, pl.DataFrame]:
        plan = self.plan
        calls = calls.filter(_is_rewarded().over("rollout"))
        if estimator.credit == GIGPO:
            episode, parts = self._over_rollouts(CREDITS["identical"](calls, plan.gamma), estimator, part)
            states, _ = self._over_calls(CREDITS["return_to_go"](calls, plan.gamma), "state", "", estimator)
            pair = [
                _labeled(episode, "episode", plan.episode_weight),
                # A state with only one call allows no comparison of states; the episode still counts.
                _labeled(states, "state", plan.state_weight).with_columns(pl.lit(0.0).alias("worth")),
            ]
            return pl.concat(pair), parts
        if estimator.credit == VINE:
            terms, parts = self._over_rollouts(CREDITS["identical"](calls, plan.gamma), estimator, part)
            between = vine_terms(terms.join(calls.select(*CALL, "state_value"), on=CALL, maintain_order="left"))
            return _labeled(between.with_columns(pl.col("value").alias("return")), "state"), parts
        if estimator.credit == RTMC:
            terms, parts = self._over_rollouts(CREDITS["return_to_go"](calls, plan.gamma), estimator, part)
            tree = rtmc_terms(
                terms.join(calls.select(*CALL, "group", "state", "action"), on=CALL, maintain_order="left")
            )
            return _labeled(tree.with_columns(pl.col("value").alias("return")), "action"), parts
        credited = credit_of(estimator)(calls, plan.gamma)
        _check_credit(estimator.credit, credited, calls)
        credited = credited.with_columns(pl.col("return").cast(pl.Float64))
        if estimator.credit == "step":
            of_step = f"{part} step {plan.step_by}:".lstrip()
            terms, parts = self._over_calls(credited, plan.step_by, of_step, estimator)
            return _labeled(terms, "step"), parts
        if plan.group_over == "turns":
            terms, parts = self._over_calls(
                credited, "turn", f"{part} {_turns(estimator, plan.gamma)}:".lstrip(), estimator
            )
            return _labeled(terms, "turn"), parts
        if plan.group_over == "calls":
            terms, parts = self._over_calls(credited, None, "", estimator)
            return _labeled(terms, "call"), parts
        terms, parts = self._over_rollouts(credited, estimator, part)
        return _labeled(terms, "rollout"), parts

    def _over_rollouts(
        self, credited: pl.DataFrame, estimator: Estimator, part: str
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Compares calls with the values of whole rollouts: R_i = rollout reward + Σ_t r_it over the given calls."""
        total = pl.col("rollout_reward").first().fill_null(0.0) + pl.col("step_reward").sum()
        worth = credited.group_by("rollout", maintain_order=True).agg(total.alias("value"))
        items = self.rollouts.select(_FACTS).join(worth, on="rollout", maintain_order="left")
        items = items.with_columns(pl.col("rollout").alias("item"), _EVERYTHING)
        past = self.history.filter(pl.col("part") == part).with_columns(_EVERYTHING)
        compared = _compare(items, past, estimator).select("rollout", "center", "scale", "drop")
        terms = credited.select(*CALL, "return").join(compared, on="rollout", how="inner", maintain_order="left")
        return terms, worth.select("rollout", pl.lit(part).alias("part"), "value")

    def _over_calls(
        self, credited: pl.DataFrame, by: str | None, part: str, estimator: Estimator
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Compares calls with calls of the same group and the same `by`; calls without a value are left out.

        With a `part`, calls of the same `by` are also compared across groups: with each other, and with the rollouts of
        `history` that have a part of the same name, which is `part` followed by the value of `by`.
        """
        keys = ["group", by] if by else ["group"]
        valued = credited.select(*CALL, *keys, "return").drop_nulls("return").sort(CALL).with_row_index("item")
        valued = valued.with_columns(pl.col("return").alias("value"))
        if not part:
            items, past = (frame.with_columns(_EVERYTHING) for frame in (valued, self.history.clear()))
            parts = _NO_PARTS
        else:
            key = pl.col(keys[-1]).cast(pl.String).fill_null("")
            in_parts = valued.with_columns(pl.concat_str(pl.lit(part), key).alias("part"))
            pools = in_parts.select("part").unique().sort("part").with_row_index("pool")
            items = in_parts.join(pools, on="part", maintain_order="left")
            past = self.history.join(pools, on="part", maintain_order="left")
            parts = in_parts.group_by("rollout", "part", maintain_order=True).agg(pl.col("value").mean())
            parts = parts.select(pl.col(name).cast(kind) for name, kind in _PARTS.items())
        items = items.select(
            "item", "rollout", "pool", "value", pl.struct(keys).rank("dense").cast(pl.UInt32).alias("group")
        ).join(self.rollouts.select(_FACTS).drop("group"), on="rollout", how="left", maintain_order="left")
        compared = _compare(items, past, estimator).select("item", "center", "scale", "drop")
        return valued.drop("value").join(compared, on="item", how="inner", maintain_order="left"), parts


def _turns(estimator: Estimator, gamma: float) -> str:
    """The name of the values of turns: those by another rule are not compared with these."""
    rule = estimator.credit
    if rule == "identical":
        return "turn"
    code = f" {code_digest(rule)[:16]}" if is_function_name(rule) else ""
    return f"turn {rule}{code} gamma {gamma!r}"


def _is_rewarded() -> pl.Expr:
    """Whether a rollout's calls have any reward: a rollout that misses it is not compared, and is no 0."""
    return pl.col("rollout_reward").first().is_not_null() | pl.col("step_reward").is_not_null().any()


def _labeled(terms: pl.DataFrame, term: str, weight: float = 1.0) -> pl.DataFrame:
    return terms.select(
        *CALL,
        pl.lit("").alias("reward_name"),
        pl.lit(term).alias("term"),
        pl.col("return").alias("value"),
        "center",
        "scale",
        pl.lit(weight).alias("weight"),
        "drop",
        pl.col("return").alias("worth"),
    )


def _compare(items: pl.DataFrame, past: pl.DataFrame, estimator: Estimator) -> pl.DataFrame:
    """Applies the baseline to `items` and to `past`, the items of earlier datasets. Each judge's rewards are a pool of their own."""
    columns = [
        "item",
        "rollout",
        "group",
        "pool",
        "value",
        "run_id",
        "judge",
        "end_ns",
        "rollout_id",
        "attempt",
        "is_branch",
    ]
    frame = items.select(columns).with_columns(pl.lit(False).alias("history"))
    if past.height:
        number = pl.lit(None, dtype=pl.UInt32)
        missing = (number.alias(name) for name in ("item", "rollout", "group"))
        before = past.with_columns(*missing, pl.lit(False).alias("is_branch"), pl.lit(True).alias("history"))
        frame = pl.concat([frame, before.select(frame.columns)]).rechunk()
    if frame["judge"].n_unique() > 1:
        frame = frame.with_columns(pl.struct("pool", "judge").rank("dense").cast(pl.UInt32).alias("pool"))
    compared = baseline_of(estimator)(frame.drop("judge"))
    _check_comparison(estimator.baseline, compared, items)
    return compared.with_columns(pl.col("center", "scale").cast(pl.Float64), pl.col("drop").cast(pl.String))


def _check_credit(name: str, credited: pl.DataFrame, calls: pl.DataFrame) -> None:
    if missing := {*CALL, "return"} - set(credited.columns):
        raise UsageError(f"credit {name!r} returned no column {sorted(missing)[0]!r}")
    if credited.height != calls.height:
        raise UsageError(f"credit {name!r} returned {credited.height} rows for {calls.height} calls")
    if not credited["return"].dtype.is_numeric() or not credited["return"].is_finite().all():
        raise UsageError(f"credit {name!r} returned a value that is not a finite number")


def _check_comparison(name: str, compared: pl.DataFrame, items: pl.DataFrame) -> None:
    missing = {"item", "center", "scale", "drop"} - set(compared.columns)
    if missing:
        raise UsageError(f"baseline {name!r} returned no column {sorted(missing)[0]!r}")
    if not compared["item"].sort().equals(items["item"].sort()):
        raise UsageError(f"baseline {name!r} returned {compared.height} rows for {items.height} items, or other items")
    numbers = compared.select("center", "scale")
    if not all(column.dtype.is_numeric() and not column.has_nulls() and column.is_finite().all() for column in numbers):
        raise UsageError(f"baseline {name!r} returned a center or scale that is not a finite number")

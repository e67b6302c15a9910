"""Advantages of calls: credit × baseline, as a sum of terms that can be shown in numbers.

    advantage = Σ_terms weight · (value − center) · scale

One term in the usual case; `gigpo` has two, `gdpo` one per reward and one for the batch. Statistics are float64, taken over
items (a rollout's return, or calls' values), and over all complete rewarded rollouts before any row is dropped.
"""

from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.credit.baselines import EPSILON, are_equal
from trainspan_processing.credit.plan import GIGPO, Estimator, Plan, baseline_of, credit_of
from trainspan_processing.credit.rules import CREDITS
from trainspan_processing.rewards.names import rollout_column, step_column
from trainspan_processing.tables import Schema
from trainspan_schemas.errors import UsageError

__all__ = ["TERMS", "Credited", "assign_advantages"]

TERMS: Final[Schema] = {
    "rollout": pl.UInt32,
    "position": pl.UInt32,
    "reward_name": pl.String,
    "term": pl.String,
    "value": pl.Float64,
    "center": pl.Float64,
    "scale": pl.Float64,
    "weight": pl.Float64,
    "drop": pl.String,
}
"""One row per call and term. `term`: `rollout` or `call` (what the statistics are over), `step`, `episode` and `state`
(gigpo), `batch` (gdpo's last step). `drop`: why this comparison says nothing, else NULL."""


_CALL: Final = ["rollout", "position"]
_FACTS: Final = ["rollout", "group", "run_id", "end_ns", "rollout_id", "attempt"]
_PARTS: Final[Schema] = {"rollout": pl.UInt32, "part": pl.String, "value": pl.Float64}
_NO_PARTS: Final = pl.DataFrame(schema=_PARTS)
_EVERYTHING: Final = pl.lit(0, dtype=pl.UInt32).alias("pool")


@dataclass(frozen=True, slots=True)
class Credited:
    """What the plan gave."""

    calls: pl.DataFrame
    """rollout, position, `return`, `advantage` (f64) and `drop` (why no comparison says anything, else NULL); only calls
    that got a value."""
    terms: pl.DataFrame
    """TERMS."""
    parts: pl.DataFrame
    """rollout, `part`, `value`: the shares of agents and rewards that later datasets compare with."""


def assign_advantages(calls: pl.DataFrame, rollouts: pl.DataFrame, history: pl.DataFrame, plan: Plan) -> Credited:
    """Advantages of `calls` by `plan`.

    `calls` have rollout, position, agent, turn, for `gigpo` state, and per reward its `step_column` and `rollout_column` (f64,
    NULL where there is none). `rollouts` have rollout, `group` (u32), run_id, end_ns, rollout_id and attempt, and are sorted by
    their ids; `history` is HISTORY. Raises UsageError where a user's function does not keep to its form.
    """
    calls = calls.join(rollouts.select("rollout", "group"), on="rollout", how="inner").sort(_CALL)
    if plan.combine == "sum":
        terms, parts = _by_agent(_summed(calls, plan), rollouts, history, plan, "")
        return Credited(_added_up(terms, several=plan.needs_states), terms.select(*TERMS), parts)
    found = []
    for reward in plan.rewards:
        own = calls.with_columns(
            pl.col(step_column(reward.name)).alias("step_reward"),
            pl.col(rollout_column(reward.name)).alias("rollout_reward"),
        )
        terms, parts = _by_agent(own, rollouts, history, plan, f"reward:{reward.name}")
        weight = pl.lit(reward.weight)
        named = terms.with_columns(
            pl.lit(reward.name).alias("reward_name"), pl.col("weight") * weight, pl.col("worth") * weight
        )
        found.append((named, parts))
    terms = pl.concat([item for item, _ in found])
    credited, whitened = _whitened(_added_up(terms, several=True), terms.select(*TERMS))
    return Credited(credited, whitened, pl.concat([parts for _, parts in found]))


def _summed(calls: pl.DataFrame, plan: Plan) -> pl.DataFrame:
    """Adds `step_reward` and `rollout_reward`, Σ_k w_k·r_k over the rewards that are there, NULL where none is."""

    def total(columns: dict[str, float]) -> pl.Expr:
        present = pl.any_horizontal(pl.col(name).is_not_null() for name in columns)
        return pl.when(present).then(pl.sum_horizontal(pl.col(name) * weight for name, weight in columns.items()))

    return calls.with_columns(
        total({step_column(reward.name): reward.weight for reward in plan.rewards}).alias("step_reward"),
        total({rollout_column(reward.name): reward.weight for reward in plan.rewards}).alias("rollout_reward"),
    )


def _by_agent(
    calls: pl.DataFrame, rollouts: pl.DataFrame, history: pl.DataFrame, plan: Plan, part: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """TERMS (with `worth`) and parts; with `per_agent` each agent's calls are credited and compared as if alone.

    An agent's return is the rollout's own reward plus those of its own calls. Estimators by role: arXiv 2506.24119.
    """
    if not plan.per_agent:
        return _terms(calls, rollouts, history, plan.estimator, plan, part)
    empty = _terms(calls.clear(), rollouts, history, plan.estimator, plan, part)
    found = [empty]
    for (agent,), own in sorted(calls.partition_by("agent", as_dict=True).items(), key=lambda item: str(item[0][0])):
        estimator = plan.by_agent.get(str(agent), plan.estimator)
        share = " ".join(filter(None, (part, f"agent:{agent}")))
        found.append(_terms(own, rollouts, history, estimator, plan, share))
    terms, parts = (pl.concat(frames) for frames in zip(*found, strict=True))
    return terms, parts


def _terms(
    calls: pl.DataFrame, rollouts: pl.DataFrame, history: pl.DataFrame, estimator: Estimator, plan: Plan, part: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """TERMS of one estimator over `calls` with step_reward and rollout_reward."""
    if estimator.credit == GIGPO:
        episode, parts = _over_rollouts(CREDITS["identical"](calls, plan.gamma), rollouts, history, estimator, part)
        states, _ = _over_calls(
            CREDITS["return_to_go"](calls, plan.gamma), "state", "", rollouts, history.clear(), estimator
        )
        pair = [
            _labelled(episode, "episode", plan.episode_weight),
            # A state that one call alone was in says nothing of it; the episode still does.
            _labelled(states, "state", plan.state_weight).with_columns(pl.lit(0.0).alias("worth")),
        ]
        return pl.concat(pair), parts
    credited = credit_of(estimator)(calls, plan.gamma)
    _check_credit(estimator.credit, credited, calls)
    if estimator.credit == "step":
        of_step = f"{part} step {plan.step_by}:".lstrip()
        terms, parts = _over_calls(credited, plan.step_by, of_step, rollouts, history, estimator)
        return _labelled(terms, "step"), parts
    if plan.group_over == "calls":
        terms, parts = _over_calls(credited, None, "", rollouts, history.clear(), estimator)
        return _labelled(terms, "call"), parts
    terms, parts = _over_rollouts(credited, rollouts, history, estimator, part)
    return _labelled(terms, "rollout"), parts


def _labelled(terms: pl.DataFrame, term: str, weight: float = 1.0) -> pl.DataFrame:
    return terms.select(
        *_CALL,
        pl.lit("").alias("reward_name"),
        pl.lit(term).alias("term"),
        pl.col("return").alias("value"),
        "center",
        "scale",
        pl.lit(weight).alias("weight"),
        "drop",
        pl.col("return").alias("worth"),
    )


def _over_rollouts(
    credited: pl.DataFrame, rollouts: pl.DataFrame, history: pl.DataFrame, estimator: Estimator, part: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Calls compared with what rollouts are worth as wholes: R_i = rollout reward + Σ_t r_it over the calls given."""
    whole, steps = pl.col("rollout_reward").first(), pl.col("step_reward")
    present = whole.is_not_null() | steps.is_not_null().any()
    total = pl.when(present).then(whole.fill_null(0.0) + steps.sum())
    worth = credited.group_by("rollout", maintain_order=True).agg(total.alias("value")).drop_nulls("value")
    items = rollouts.select(_FACTS).join(worth, on="rollout", maintain_order="left")
    items = items.with_columns(pl.col("rollout").alias("item"), _EVERYTHING)
    past = history.filter(pl.col("part") == part).with_columns(_EVERYTHING)
    compared = _compare(items, past, estimator).select("rollout", "center", "scale", "drop")
    terms = credited.select(*_CALL, "return").join(compared, on="rollout", how="inner", maintain_order="left")
    return terms, worth.select("rollout", pl.lit(part).alias("part"), "value")


def _over_calls(
    credited: pl.DataFrame,
    by: str | None,
    part: str,
    rollouts: pl.DataFrame,
    history: pl.DataFrame,
    estimator: Estimator,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Calls compared with calls of the same group and the same `by`; those without a value are left out.

    With a `part` those of the same `by` are compared beyond groups, too: with each other, and with what rollouts of
    `history` had under its name, which is `part` and the value of `by`.
    """
    keys = ["group", by] if by else ["group"]
    valued = credited.select(*_CALL, *keys, "return").drop_nulls("return").sort(_CALL).with_row_index("item")
    valued = valued.with_columns(pl.col("return").alias("value"))
    if not part:
        items, past, parts = valued.with_columns(_EVERYTHING), history.clear().with_columns(_EVERYTHING), _NO_PARTS
    else:
        key = pl.col(keys[-1]).cast(pl.String).fill_null("")
        named = valued.with_columns(pl.concat_str(pl.lit(part), key).alias("part"))
        pools = named.select("part").unique().sort("part").with_row_index("pool")
        items = named.join(pools, on="part", maintain_order="left")
        past = history.join(pools, on="part", maintain_order="left")
        parts = named.group_by("rollout", "part", maintain_order=True).agg(pl.col("value").mean())
        parts = parts.select(pl.col(name).cast(kind) for name, kind in _PARTS.items())
    items = items.select(
        "item", "rollout", "pool", "value", pl.struct(keys).rank("dense").cast(pl.UInt32).alias("group")
    ).join(rollouts.select(_FACTS).drop("group"), on="rollout", how="left", maintain_order="left")
    compared = _compare(items, past, estimator).select("item", "center", "scale", "drop")
    return valued.drop("value").join(compared, on="item", how="inner", maintain_order="left"), parts


def _compare(items: pl.DataFrame, past: pl.DataFrame, estimator: Estimator) -> pl.DataFrame:
    """The baseline over `items`, those of earlier datasets among them."""
    columns = ["item", "rollout", "group", "pool", "value", "run_id", "end_ns", "rollout_id", "attempt"]
    frame = items.select(columns).with_columns(pl.lit(False).alias("history"))
    if past.height:
        number = pl.lit(None, dtype=pl.UInt32)
        missing = (number.alias(name) for name in ("item", "rollout", "group"))
        before = past.with_columns(*missing, pl.lit(True).alias("history"))
        frame = pl.concat([frame, before.select(frame.columns)]).rechunk()
    compared = baseline_of(estimator)(frame)
    _check_comparison(estimator.baseline, compared, items)
    return compared


def _added_up(terms: pl.DataFrame, *, several: bool) -> pl.DataFrame:
    """rollout, position, return, advantage and drop from TERMS with `worth`; `several`: a call may have more than one."""
    advantage = pl.col("weight") * (pl.col("value") - pl.col("center")) * pl.col("scale")
    if not several:
        return terms.select(*_CALL, pl.col("worth").alias("return"), advantage.alias("advantage"), "drop")
    # Groups of one sorted number are slices; those of two columns are lists, which take ten times the memory.
    call = pl.col("rollout").cast(pl.UInt64) * 2**32 + pl.col("position")
    says_nothing = pl.col("drop").is_not_null().all()
    return (
        terms.select(call.alias("call"), advantage.alias("advantage"), "worth", "drop")
        .sort("call", maintain_order=True)
        .group_by("call", maintain_order=True)
        .agg(
            pl.col("worth").sum().alias("return"),
            pl.col("advantage").sum(),
            pl.when(says_nothing).then(pl.col("drop").first()).alias("drop"),
        )
        .select(
            (pl.col("call") // 2**32).cast(pl.UInt32).alias("rollout"),
            (pl.col("call") % 2**32).cast(pl.UInt32).alias("position"),
            "return",
            "advantage",
            "drop",
        )
    )


def _whitened(calls: pl.DataFrame, terms: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(A − μ_batch) / (σ_batch + ε) over rollouts, of the sum A of the rewards' own advantages.

    GDPO, arXiv 2601.05242, eqs. 4 to 6: each reward is normalised in its group, the weighted sum over the batch.
    """
    per_rollout = calls.group_by("rollout", maintain_order=True).agg(pl.col("advantage").mean())["advantage"]
    mean, spread = per_rollout.mean(), per_rollout.std()
    if not isinstance(mean, float) or not isinstance(spread, float):
        return calls, terms
    if pl.select(are_equal(pl.lit(per_rollout.min()), pl.lit(per_rollout.max()))).item():
        return calls, terms
    scale = 1.0 / (spread + EPSILON)
    last_step = calls.select(
        *_CALL,
        pl.lit("").alias("reward_name"),
        pl.lit("batch").alias("term"),
        pl.lit(0.0).alias("value"),
        pl.lit(mean).alias("center"),
        pl.lit(scale).alias("scale"),
        pl.lit(1.0).alias("weight"),
        pl.lit(None, dtype=pl.String).alias("drop"),
    )
    return (
        calls.with_columns((pl.col("advantage") - mean) * scale),
        pl.concat([terms.with_columns(pl.col("weight") * scale), last_step]),
    )


def _check_credit(name: str, credited: pl.DataFrame, calls: pl.DataFrame) -> None:
    if missing := {*_CALL, "return"} - set(credited.columns):
        raise UsageError(f"credit {name!r} returned no column {sorted(missing)[0]!r}")
    if credited.height != calls.height:
        raise UsageError(f"credit {name!r} returned {credited.height} calls for {calls.height}")
    if not credited["return"].dtype.is_numeric() or not credited["return"].is_finite().all():
        raise UsageError(f"credit {name!r} returned a value that is no finite number")


def _check_comparison(name: str, compared: pl.DataFrame, items: pl.DataFrame) -> None:
    missing = {"item", "center", "scale", "drop"} - set(compared.columns)
    if missing:
        raise UsageError(f"baseline {name!r} returned no column {sorted(missing)[0]!r}")
    if not compared["item"].sort().equals(items["item"].sort()):
        raise UsageError(f"baseline {name!r} returned {compared.height} items for {items.height}")
    numbers = compared.select("center", "scale")
    if not all(column.dtype.is_numeric() and column.is_finite().all() for column in numbers):
        raise UsageError(f"baseline {name!r} returned a center or scale that is no finite number")

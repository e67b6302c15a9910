"""How many rewards the stores got since a place (`seq`)."""

from collections.abc import Sequence
from typing import Final

from trainspan_loop.clients.store import rows
from trainspan_processing.reasons.drop_reasons import UNTRUSTED_REWARD, admitted_reasons
from trainspan_processing.rewards.names import reward_names
from trainspan_schemas.config.policy_scope import policies_of, scoped
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.telemetry import keys

__all__ = ["Places", "last_places", "new_rewards", "validation_rewards"]

Places = tuple[int, ...]
"""A place (`seq`) in each store, in their order."""

_REACHED: Final = """SELECT coalesce(max(seq), 0) AS seq FROM (
    SELECT max(seq) AS seq FROM stored.live_spans UNION ALL SELECT max(seq) FROM stored.live_logs)"""
_IS_ROLLOUT: Final = f"""json_extract_string(attributes, '$."{keys.ROLLOUT_STATUS}"') IS NOT NULL"""


def last_places(stores: Sequence[str]) -> Places:
    """The places that the stores have reached. Raises StoreError."""
    return tuple(int(rows(store, _REACHED)[0]["seq"]) for store in stores)


def new_rewards(stores: Sequence[str], settings: Settings, since: Places) -> tuple[int, Places]:
    """The number of trusted or admitted rewards after these places, and the places up to which they were counted.

    Rewards are those with a reward name of any policy, and people's labels. If a function rewards the rollouts of any policy, these
    are the rollouts that ended. Raises StoreError.
    """
    table, condition = _rewards(settings)
    query = f"SELECT count(*) FILTER ({condition}) AS rewards, max(seq) AS seq FROM {table} WHERE seq > "
    newest = [rows(store, f"{query}{seq}")[0] for store, seq in zip(stores, since, strict=True)]
    reached = (seq if row["seq"] is None else row["seq"] for row, seq in zip(newest, since, strict=True))
    return sum(row["rewards"] for row in newest), tuple(reached)


def validation_rewards(stores: Sequence[str], settings: Settings, since: Places) -> int:
    """How many of these rewards are of validation rollouts. Raises StoreError."""
    table, condition = _rewards(settings)
    id_ = "trace_id" if table == "spans" else "rollout_id"
    of_validation = f"{id_} IN (SELECT {id_} FROM rollouts WHERE split = 'val')"
    query = f"SELECT count(*) AS rewards FROM {table} WHERE {condition} AND {of_validation} AND seq > "
    return sum(int(rows(store, f"{query}{seq}")[0]["rewards"]) for store, seq in zip(stores, since, strict=True))


def _rewards(settings: Settings) -> tuple[str, str]:
    """The table that has a row for each reward, and the condition for these rows."""
    datasets = [scoped(settings, policy).dataset for policy in policies_of(settings)]
    if any(dataset.reward is not None for dataset in datasets):
        return "spans", _IS_ROLLOUT
    distinct = {item.name for dataset in datasets for item in reward_names(dataset.reward_name)}
    names = ", ".join("'" + name.replace("'", "''") + "'" for name in sorted(distinct))
    is_admitted = any(UNTRUSTED_REWARD in admitted_reasons(dataset.admit) for dataset in datasets)
    trusted = "NOT coalesce(untrusted, false)"
    by_name = f"name IN ({names}) AND source <> '{keys.LABEL}' AND {'true' if is_admitted else trusted}"
    by_label = f"name = '{keys.LABEL}' AND source = '{keys.LABEL}' AND {trusted}"
    return "evaluations", f"isfinite(score) AND ({by_name} OR {by_label})"

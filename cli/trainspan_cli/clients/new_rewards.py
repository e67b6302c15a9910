"""How many rewards the store got since a place (`seq`): the cost depends on what came since, not on the store's size."""

from typing import Final

from trainspan_cli.clients.store import rows
from trainspan_processing.rewards.names import reward_names
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.telemetry import keys

__all__ = ["last_seq", "new_rewards", "validation_rewards"]

_IS_ROLLOUT: Final = f"""json_extract_string(attributes, '$."{keys.ROLLOUT_STATUS}"') IS NOT NULL"""


def last_seq(store: str) -> int:
    """The place that the store has reached. Raises StoreError."""
    return int(rows(store, "SELECT coalesce(max(seq), 0) AS seq FROM spans")[0]["seq"])


def new_rewards(store: str, settings: DatasetSettings, since_seq: int) -> tuple[int, int]:
    """The number of trusted rewards after a place, and the place up to which they were counted.

    If a function rewards rollouts, these are the rollouts that ended. Raises StoreError.
    """
    table, condition = _rewards(settings)
    query = f"SELECT count(*) FILTER ({condition}) AS rewards, max(seq) AS seq FROM {table} WHERE seq > {since_seq}"
    [found] = rows(store, query)
    return found["rewards"], since_seq if found["seq"] is None else found["seq"]


def validation_rewards(store: str, settings: DatasetSettings, since_seq: int) -> int:
    """How many of these rewards are of validation rollouts. Raises StoreError."""
    table, condition = _rewards(settings)
    of_validation = "rollout_id IN (SELECT rollout_id FROM rollouts WHERE split = 'val')"
    query = f"SELECT count(*) AS rewards FROM {table} WHERE seq > {since_seq} AND {condition} AND {of_validation}"
    return int(rows(store, query)[0]["rewards"])


def _rewards(settings: DatasetSettings) -> tuple[str, str]:
    """The table that has a row for each reward, and the condition for these rows."""
    if settings.reward is not None:
        return "spans", _IS_ROLLOUT
    names = ", ".join("'" + item.name.replace("'", "''") + "'" for item in reward_names(settings.reward_name))
    return "evaluations", f"NOT coalesce(untrusted, false) AND name IN ({names})"

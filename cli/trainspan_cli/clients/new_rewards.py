"""How many rewards the store got since a place (`seq`): the cost depends on what came since, not on the store's size."""

from typing import Final

from trainspan_cli.clients.store import rows
from trainspan_processing.rewards.names import reward_names
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.telemetry import keys

__all__ = ["last_seq", "new_rewards"]

_IS_ROLLOUT: Final = f"""json_extract_string(attributes, '$."{keys.ROLLOUT_STATUS}"') IS NOT NULL"""


def last_seq(store: str) -> int:
    """The place that the store has reached. Raises StoreError."""
    return int(rows(store, "SELECT coalesce(max(seq), 0) AS seq FROM spans")[0]["seq"])


def new_rewards(store: str, settings: DatasetSettings, since_seq: int) -> tuple[int, int]:
    """The number of trusted rewards after a place, and the place up to which they were counted.

    If a function rewards rollouts, these are the rollouts that ended. Raises StoreError.
    """
    if settings.reward is not None:
        table, condition = "spans", _IS_ROLLOUT
    else:
        names = ", ".join("'" + item.name.replace("'", "''") + "'" for item in reward_names(settings.reward_name))
        table, condition = "evaluations", f"NOT coalesce(untrusted, false) AND name IN ({names})"
    query = f"SELECT count(*) FILTER ({condition}) AS rewards, max(seq) AS seq FROM {table} WHERE seq > {since_seq}"
    [found] = rows(store, query)
    return found["rewards"], since_seq if found["seq"] is None else found["seq"]

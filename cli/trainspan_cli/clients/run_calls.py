"""The number of model calls that the policy server recorded for a round, whatever the agents' language."""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainspan_loop.clients.store import counts
from trainspan_schemas.errors import StoreError
from trainspan_schemas.store.access import running_collector

__all__ = ["stored_calls"]

_PAUSE_S: Final = 0.5
_PATIENCE_S: Final = 3.0
"""The policy server exports a call a tenth of a second after its end."""


def stored_calls(stores: Sequence[str], run_id: str, round_: int, counted: int) -> int | None:
    """Counts the stored requests of this run and round, over all attempts; None if no collector runs for one of the stores.

    Waits up to 3 s until at least `counted` (the agents' count) are stored and the number is stable.
    """
    paths = [Path(store) for store in stores if "://" not in store]
    if importlib.util.find_spec("pyarrow") is None or None in map(running_collector, paths):
        return None
    quoted = run_id.replace("'", "''")
    # The choices of one request have the same start.
    sql = f"""SELECT count(DISTINCT (rollout_id, attempt, call_index, start_ns)) AS requests
        FROM calls WHERE run_id = '{quoted}' AND round = {round_:d}"""
    deadline, seen = time.monotonic() + _PATIENCE_S, -1
    while True:
        try:
            now = counts(stores, sql)["requests"]
        except StoreError:
            return None
        if time.monotonic() > deadline or (now == seen and now >= counted):
            return now
        seen = now
        time.sleep(_PAUSE_S)

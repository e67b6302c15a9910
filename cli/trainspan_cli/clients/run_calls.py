"""The number of model calls that the policy server recorded for a round, whatever the agents' language."""

import importlib.util
import time
from pathlib import Path
from typing import Final

from trainspan_cli.clients.store import rows
from trainspan_schemas.errors import StoreError
from trainspan_schemas.store.access import running_collector

__all__ = ["stored_calls"]

_PAUSE_S: Final = 0.5
_PATIENCE_S: Final = 3.0
"""The policy server exports a call a tenth of a second after its end."""


def stored_calls(store: Path, run_id: str, round_: int, counted: int) -> int | None:
    """Counts the stored requests of this run and round, over all attempts; None if no collector runs for the store.

    Waits up to 3 s until at least `counted` (the agents' count) are stored and the number is stable.
    """
    if importlib.util.find_spec("pyarrow") is None or running_collector(store) is None:
        return None
    quoted = run_id.replace("'", "''")
    # The choices of one request have the same start.
    sql = f"""SELECT count(DISTINCT (rollout_id, attempt, call_index, start_ns)) AS requests
        FROM calls WHERE run_id = '{quoted}' AND round = {round_:d}"""
    deadline, seen = time.monotonic() + _PATIENCE_S, -1
    while True:
        try:
            now = int(rows(str(store), sql)[0]["requests"])
        except StoreError:
            return None
        if time.monotonic() > deadline or (now == seen and now >= counted):
            return now
        seen = now
        time.sleep(_PAUSE_S)

"""Skipped rounds, which train nothing: their reasons, their number, and an alarm for too many in a row."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainspan_loop.checks.integrity import Check
from trainspan_schemas.artifacts.run_records import RoundRecord, RunRecord, rounds_in

__all__ = ["MOST_IN_A_ROW", "skip_check", "skip_reason", "skipped_rounds"]

MOST_IN_A_ROW: Final = 2
"""Maximum number of skipped rounds in a row that chance explains; more have another cause."""


def skip_reason(manifest: Mapping[str, Any], skipped: str | None) -> str | None:
    """The reason to skip the round, from its manifest and the trainer's reason."""
    if not skipped:
        return None
    dropped: Mapping[str, int] = manifest.get("dropped") or {}
    if manifest.get("rows") == 0 and dropped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
        return f"no contrast: none of {manifest['calls_seen']} calls is trained ({reasons})"
    return skipped


def skipped_rounds(records: Sequence[RunRecord]) -> list[RoundRecord]:
    """The records of skipped rounds."""
    return [record for record in rounds_in(records) if record.get("skipped")]


def skip_check(records: Sequence[RunRecord], skipped: str | None) -> Check:
    """Checks that rounds train the policy, for the round after `records`."""
    in_a_row = 1 if skipped else 0
    for record in reversed(rounds_in(records) if skipped else []):
        if not record.get("skipped"):
            break
        in_a_row += 1
    if skipped is None:
        return Check("rounds train the policy", True, "not skipped")
    detail = f"skipped, {in_a_row} in a row: {skipped}"
    if in_a_row > MOST_IN_A_ROW:
        detail += "; the policy does not change: inspect some rollouts with `trainspan explain`, then change tasks, judge or n"
    return Check("rounds train the policy", in_a_row <= MOST_IN_A_ROW, detail)

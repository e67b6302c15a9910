"""The switch that turns all of trainspan off in a process."""

import os

__all__ = ["is_disabled"]


def is_disabled() -> bool:
    """Whether `TRAINSPAN_DISABLED=1` is set."""
    return os.environ.get("TRAINSPAN_DISABLED", "").lower() in ("1", "true", "yes", "on")

"""Exit codes of commands that tell programs what to do next; all others are 0 (done), 1 (failed) and 2 (wrong usage)."""

from typing import Final

__all__ = ["NOTHING_TO_TRAIN", "UNFINISHED"]

NOTHING_TO_TRAIN: Final = 3
"""`trainspan dataset`: no call can be trained; `trainspan branch`: no call can be branched from."""
UNFINISHED: Final = 75
"""`trainspan rollout`: the same command with `--resume` continues (`EX_TEMPFAIL` of sysexits.h)."""

"""The one command `trainspan` and the loop; sub-commands import their part only when they run."""

"""The progress of a run on disk, which `--resume` reads: `run_ledger` writes it; `paths`, `lines`, `recorded` find and read it."""

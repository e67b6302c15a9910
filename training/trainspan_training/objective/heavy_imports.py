"""torch, transformers and TRL, imported quietly and without vLLM."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["import_training"]


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Within the block `module` appears not to be installed; no effect if it is already imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # the documented way to block an import
    try:
        yield
    finally:
        del sys.modules[module]


def import_training() -> None:
    """Imports torch, transformers and TRL, quietly.

    TRL imports vLLM for generation if it is installed, which takes four seconds and is not needed here.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # `find_model` has downloaded everything needed
    with _hidden("vllm"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging as transformers_logging

        from trainspan_training.objective import grpo_trainer  # noqa: F401
    quiet: Any = transformers_logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()

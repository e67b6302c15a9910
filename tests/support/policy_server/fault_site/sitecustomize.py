"""Plants a fault in a loop's policy server: put this folder on PYTHONPATH, and its name in the file $TRAINSPAN_TEST_FAULT.

`frozen`: a swap loads nothing. `blind`: a swap loads nothing, and the canary reports it as fresh.
"""

import os
from pathlib import Path
from typing import Any

from trainspan_serving import worker
from trainspan_serving.swap import verifier

_load, _judge = worker.PolicyWorker.trainspan_reload, verifier.judge


def _fault() -> str:
    file = Path(os.environ["TRAINSPAN_TEST_FAULT"])
    return file.read_text() if file.exists() else ""


def _load_or_not(self: Any, folder: str, adapter: str | None = None) -> None:
    if not _fault():
        _load(self, folder, adapter)


def _judge_or_not(*arguments: Any, **options: Any) -> Any:
    report = _judge(*arguments, **options)
    if _fault() == "blind":
        report = verifier.CanaryReport("fresh", "planted", report.dtype)
    return report


worker.PolicyWorker.trainspan_reload = _load_or_not  # type: ignore[method-assign]
verifier.judge = _judge_or_not

"""Planted faults for a policy server: the file named by `TRAINSPAN_TEST_FAULT` contains the active one.

`unpacked`: weights are reloaded as in plain vLLM, without repacking the output head. `frozen`: they are not reloaded
at all. `forgotten reset`: the prefix cache is not cleared, although it reports success. `broken generation`:
every generation fails after its first output. `broken load`: no weights can be loaded except version 0.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from trainspan_serving.worker import PolicyWorker

__all__ = ["FAULT_VARIABLE", "FaultyEngine", "FaultyWorker"]

FAULT_VARIABLE = "TRAINSPAN_TEST_FAULT"


def fault() -> str:
    file = Path(os.environ[FAULT_VARIABLE])
    return file.read_text() if file.exists() else ""


class FaultyWorker(PolicyWorker):
    """For `--worker-extension-cls`."""

    def trainspan_reload(self: Any, folder: str, adapter: str | None = None) -> None:
        if fault() == "broken load" and not folder.endswith(("base", "policy-000000")):
            raise OSError("planted")
        if fault() == "unpacked":
            self.reload_weights(weights_path=folder)
        elif fault() != "frozen":
            PolicyWorker.trainspan_reload(self, folder, adapter)


class FaultyEngine:
    """For `--middleware`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            _forget_resets(scope["app"].state.engine_client)
            _break_generation(scope["app"].state.engine_client)
        await self._app(scope, receive, send)


def _forget_resets(client: Any) -> None:
    reset, pause = client.reset_prefix_cache, client.pause_generation

    async def reset_or_not(**options: Any) -> bool:
        return True if fault() == "forgotten reset" else bool(await reset(**options))

    async def pause_or_clear(**options: Any) -> None:
        await pause(**options, clear_cache=fault() != "forgotten reset")

    client.reset_prefix_cache, client.pause_generation = reset_or_not, pause_or_clear


def _break_generation(client: Any) -> None:
    generate = client.generate

    async def generate_or_fail(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        async for output in generate(*arguments, **options):
            yield output
            if fault() == "broken generation":
                raise RuntimeError("planted")

    client.generate = generate_or_fail

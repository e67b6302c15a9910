"""Tries each grammar in a process of its own before the engine gets it: there it can be ended, with its client or by a limit."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

__all__ = ["GrammarText", "GrammarTooSlowError", "GrammarTrial"]

_log = logging.getLogger(__name__)

_LIMIT_S: Final = 10.0
"""CPU time limit for compiling a grammar; the engine then needs about as long, on a core of its own."""
_PARSE_LIMIT_S: Final = 0.5
"""CPU time limit for parsing it, which vLLM does in its event loop: all other requests wait meanwhile."""
_SILENCE_S: Final = 60.0
"""Time to wait for the process: others use the CPU, too."""
_MAX_BYTES: Final = 2**31
"""Memory for compiling."""
_KNOWN: Final = 4096
"""Grammars that are not tried again."""


class GrammarTooSlowError(Exception):
    """A grammar takes too much time or memory to compile."""


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar as vLLM passes it to xgrammar."""

    form: str
    """`json_schema`, `regex`, `ebnf`, `lark` or `structural_tag`."""
    spec: str
    any_whitespace: bool


class GrammarTrial:
    """Compiles one grammar at a time; `tokenizer` returns the tokenizer as serialized by xgrammar."""

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        self._tokenizer = tokenizer
        self._process: asyncio.Task[asyncio.subprocess.Process | None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._costs: OrderedDict[bytes, str | None] = OrderedDict()
        """Digest of a grammar → what it costs if that is too much."""

    async def check(self, grammar: GrammarText) -> None:
        """Returns once the grammar has been compiled, or has an error, which vLLM tells. Raises GrammarTooSlowError.

        If this is cancelled, the compilation ends.
        """
        key = hashlib.sha256(repr(grammar).encode(errors="surrogatepass")).digest()
        if key not in self._costs:
            async with self._one_at_a_time:
                if key not in self._costs:
                    self._costs[key] = await self._try(grammar)
                    if len(self._costs) > _KNOWN:
                        self._costs.popitem(last=False)
        self._costs.move_to_end(key)
        if (cost := self._costs[key]) is not None:
            _log.warning("grammar refused form=%s characters=%d: it takes %s", grammar.form, len(grammar.spec), cost)
            raise GrammarTooSlowError(f"the grammar of this request takes {cost}: make it smaller")

    async def close(self) -> None:
        """Ends the process, if there is one."""
        process = await self._process if self._process else None
        if process is not None:
            process.kill()
            await process.wait()

    async def _try(self, grammar: GrammarText) -> str | None:
        """Returns what the grammar costs if that is too much."""
        if self._process is None:
            self._process = asyncio.create_task(self._start())
        process = await asyncio.shield(self._process)  # it starts also for a client that does not wait for it
        if process is None:
            return None
        request = {**asdict(grammar), "limit_s": _LIMIT_S, "max_bytes": _MAX_BYTES}
        answer = b""
        try:
            answer = await asyncio.wait_for(_exchange(process, json.dumps(request)), _SILENCE_S)
        except TimeoutError:
            raise GrammarTooSlowError(f"the grammar was not compiled within {_SILENCE_S:g} s: try again") from None
        finally:
            if not answer:  # the process died of it, or is of no more use
                self._process = None
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if not answer:
            return f"more than {_LIMIT_S:g} s or {_MAX_BYTES >> 30} GiB to compile"
        return f"more than {_PARSE_LIMIT_S:g} s to read" if json.loads(answer)["parse_s"] > _PARSE_LIMIT_S else None

    async def _start(self) -> asyncio.subprocess.Process | None:
        """Starts the process; None, and grammars are no longer tried, if that fails."""
        try:
            if process := await self._started():
                return process
            reason = "the process for that does not start"
        except Exception as error:  # noqa: BLE001  # the tokenizer's code, or no memory for a process
            reason = str(error) or type(error).__name__
        _log.error("grammars are not tried before the engine compiles them: %s", reason)
        return None

    async def _started(self) -> asyncio.subprocess.Process | None:
        tokenizer = await asyncio.to_thread(self._tokenizer)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trainspan_serving.capture.grammar_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        if await _exchange(process, tokenizer):
            return process
        await process.wait()
        return None


async def _exchange(process: asyncio.subprocess.Process, line: str) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(line.encode() + b"\n")
        await process.stdin.drain()
    return await process.stdout.readline()

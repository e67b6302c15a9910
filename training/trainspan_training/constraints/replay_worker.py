"""A separate process that compiles grammars and walks completions: a hostile grammar can harm only this process.

`python -m trainspan_training.constraints.replay_worker` reads messages from stdin and answers on stdout. The first
message is the tokenizer, as serialized by xgrammar; each later one is a grammar with the completions sampled under it.
A forked child answers it, with at most `max_bytes` of additional memory and `limit_s` of CPU time for each answer. The
last message about a grammar is `{"ended": …}`: null, or why answers are missing: `slow`, `failed` or `too_many_masks`.
"""

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from trainspan_training.constraints.grammars import Walk

__all__ = ["Answer", "Request", "read_message", "write_message"]

_HEAD = struct.Struct("<II")
_TOO_MANY = 3
_ENDS = {0: None, -signal.SIGPROF: "slow", _TOO_MANY: "too_many_masks"}
"""Exit code of a child → the reported reason."""


class Request(TypedDict):
    """A grammar, and the completions sampled under it, whose ids (i32) are the payload."""

    constraint: str
    calls: Sequence[tuple[int, int]]
    """(number of tokens, number before the first masked one) of each."""
    limit_s: float
    max_bytes: int
    max_mask_bytes: int


class Answer(TypedDict, total=False):
    """`ready` and `compiled` come first, then an answer for each completion, then `ended`."""

    ready: bool
    compiled: bool
    masks: int
    """Number of new masks (k, W) u32 in the payload; after them, for each token (C,) i32, the index of its mask, or −1."""
    error: str
    ended: str | None


def write_message(stream: IO[bytes], header: Mapping[str, object], payload: bytes = b"") -> None:
    """Writes a JSON header and a payload, each prefixed with its length."""
    text = json.dumps(header).encode()
    stream.write(_HEAD.pack(len(text), len(payload)) + text + payload)
    stream.flush()


def read_message(read: Callable[[int], bytes | bytearray]) -> tuple[Any, bytes | bytearray] | None:
    """Reads the next message with `read(size)`; None at the end of the stream or if it is truncated."""
    head = read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    sizes = _HEAD.unpack(head)
    text, payload = (read(size) for size in sizes)
    if (len(text), len(payload)) != sizes:
        return None
    return json.loads(text), payload


def main() -> None:
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps xgrammar's output out of the answers
    read = sys.stdin.buffer.read
    first = read_message(read)
    if first is None:
        return
    import xgrammar

    from trainspan_training.constraints import grammars  # noqa: F401  # imported once, not in every child

    info = xgrammar.TokenizerInfo.deserialize_json(first[1].decode())
    write_message(stdout, {"ready": True})
    while (message := read_message(read)) is not None:
        child = os.fork()
        if child == 0:
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            _answer(stdout, compiler, *message)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        write_message(stdout, {"ended": _ENDS.get(code, "failed")})


class _Answers:
    """Writes answers under a CPU time limit for each: SIGPROF ends the process if it is exceeded."""

    def __init__(self, stdout: IO[bytes], limit_s: float) -> None:
        self._stdout = stdout
        self._limit_s = limit_s
        signal.setitimer(signal.ITIMER_PROF, limit_s)

    def write(self, header: Answer, payload: bytes = b"") -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)  # no partial writes
        write_message(self._stdout, header, payload)
        signal.setitimer(signal.ITIMER_PROF, self._limit_s)


def _answer(stdout: IO[bytes], compiler: Any, header: Request, payload: bytes | bytearray) -> None:
    """Answers `{"compiled": true}` or `{"error": …}`; then, for each completion, its masks: see `_walk`."""
    from trainspan_schemas.telemetry.constraints import Constraint
    from trainspan_training.constraints.grammars import Walk, compile_grammar

    _limit_memory(header["max_bytes"])
    answers = _Answers(stdout, header["limit_s"])
    grammar = Constraint.from_json(header["constraint"]).grammar
    assert grammar is not None
    try:
        compiled = compile_grammar(compiler, grammar)
    except Exception as error:  # noqa: BLE001  # any library error about untrusted input
        answers.write({"error": " ".join(str(error).split())[:200] or type(error).__name__})
        return
    answers.write({"compiled": True})
    _walk(answers, Walk(compiled, grammar), header, payload)


def _walk(answers: _Answers, walk: "Walk", header: Request, payload: bytes | bytearray) -> None:
    """Answers for each completion. The indexes count all masks so far.

    A completion that fails gives an `error`. Ends the process if all masks together take more than `max_mask_bytes`.
    """
    import numpy as np

    from trainspan_training.constraints.grammars import NotReproducedError

    ids = np.frombuffer(payload, dtype=np.int32)
    known: dict[bytes, int] = {}
    start = 0
    for length, free in header["calls"]:
        tokens, start = ids[start : start + length], start + length
        index, new = np.full(length, -1, dtype=np.int32), []
        position = free
        walk.begin()
        try:
            for position in range(free, length):
                mask = walk.step(int(tokens[position]))
                if mask is None:
                    break
                bits = mask.tobytes()
                if bits not in known:
                    known[bits] = len(known)
                    new.append(bits)
                index[position] = known[bits]
        except NotReproducedError as error:
            for bits in new:
                del known[bits]
            answers.write({"error": f"{error} at place {position}"})
            continue
        if sum(map(len, known)) > header["max_mask_bytes"]:
            os._exit(_TOO_MANY)
        answers.write({"masks": len(new)}, b"".join(new) + index.tobytes())


def _limit_memory(more: int) -> None:
    """Limits memory to `more` bytes beyond the current use."""
    with open("/proc/self/status", encoding="ascii") as file:
        taken = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + more, taken + more))


if __name__ == "__main__":
    main()

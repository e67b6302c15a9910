"""Compiles grammars in a process that can be killed: vLLM compiles them in its engine, where nothing ends that.

`python -m trainspan_serving.capture.grammar_worker` reads lines of JSON from stdin, and answers each with one on stdout. The
first line is the tokenizer, as serialized by xgrammar, answered with `{}`. Each later one is a grammar: `form`, `spec`,
`any_whitespace`, `limit_s` (CPU time, after which SIGPROF ends the process) and `max_bytes` of additional memory. The answer
is `{"parse_s": …}`, the CPU time of the part that vLLM does in its event loop. A grammar with an error is answered, too: the
error is vLLM's to tell.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from typing import IO, Any

from trainspan_schemas.files.durable import JsonObject

__all__ = ["main"]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps xgrammar's output out of the answers
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    _answer(answers, {})
    for line in sys.stdin:
        request = json.loads(line)
        _limit_memory(request["max_bytes"])
        signal.setitimer(signal.ITIMER_PROF, request["limit_s"])
        parse_s = _try(xgrammar, info, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answers, {"parse_s": parse_s})


def _answer(answers: IO[str], values: dict[str, float]) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def _try(xgrammar: Any, info: Any, request: JsonObject) -> float:
    """Compiles a grammar; returns the CPU time of its parsing."""
    began = time.process_time()
    with contextlib.suppress(Exception):  # any library error about untrusted input
        grammar = _parse(xgrammar, request["form"], request["spec"], any_whitespace=request["any_whitespace"])
        parse_s = time.process_time() - began
        xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_grammar(grammar)
        return parse_s
    return time.process_time() - began


def _parse(xgrammar: Any, form: str, spec: str, *, any_whitespace: bool) -> Any:
    """Parses a grammar as vLLM 0.32 does (v1/structured_output/backend_xgrammar.py)."""
    if form == "json_schema":
        separators = None if any_whitespace else (",", ":")
        return xgrammar.Grammar.from_json_schema(spec, any_whitespace=any_whitespace, separators=separators)
    if form == "structural_tag":
        tag: JsonObject = json.loads(spec)
        if "structures" not in tag:
            return xgrammar.Grammar.from_structural_tag(spec)
        items = [
            xgrammar.StructuralTagItem(begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"])
            for item in tag["structures"]
        ]
        return xgrammar.Grammar.from_structural_tag(items, tag["triggers"])
    read = {"regex": "from_regex", "ebnf": "from_ebnf", "lark": "from_lark"}[form]
    return getattr(xgrammar.Grammar, read)(spec)


def _limit_memory(more: int) -> None:
    """Limits memory to `more` bytes beyond the current use."""
    with open("/proc/self/status", encoding="ascii") as file:
        taken = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + more, hard))


if __name__ == "__main__":
    main()

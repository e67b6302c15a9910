"""Grammars of constrained calls, compiled and walked as vLLM 0.32 does (v1/structured_output/backend_xgrammar.py).

Jump-forward decoding is off there, so that each token is sampled under the mask that follows from the preceding tokens.
"""

import json

import numpy as np
import xgrammar
from numpy.typing import NDArray

from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry.constraints import Grammar

__all__ = ["NotReproducedError", "Walk", "compile_grammar"]


class NotReproducedError(ValueError):
    """The grammar bars a token that was logged as sampled under it."""


def compile_grammar(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    """Compiles the grammar as vLLM does. Passes on xgrammar's exceptions."""
    spec = grammar.spec
    if grammar.form == "json_schema":
        separators = None if grammar.any_whitespace else (",", ":")
        return compiler.compile_json_schema(spec, any_whitespace=grammar.any_whitespace, separators=separators)
    if grammar.form == "regex":
        return compiler.compile_regex(spec)
    if grammar.form == "ebnf":
        return compiler.compile_grammar(spec)
    if grammar.form == "lark":
        return compiler.compile_lark(spec)
    if grammar.form == "structural_tag":
        tag: JsonObject = json.loads(spec)
        if "structures" not in tag:
            return compiler.compile_structural_tag(spec)
        items = [
            xgrammar.StructuralTagItem(begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"])
            for item in tag["structures"]
        ]
        return compiler.compile_structural_tag(items, tag["triggers"])
    raise ValueError(f"unknown grammar form {grammar.form!r}")


class Walk:
    """Steps through completions and gives the grammar's masks."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, grammar: Grammar) -> None:
        stop_ids = list(grammar.stop_ids) or None
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stop_ids)
        self._mask = xgrammar.allocate_token_bitmask(1, grammar.vocab_size)
        self._bits: NDArray[np.uint32] = self._mask.numpy().view(np.uint32)[0]
        self._size = grammar.vocab_size

    def begin(self) -> None:
        """Starts a new completion."""
        self._matcher.reset()

    def step(self, token: int) -> NDArray[np.uint32] | None:
        """The mask (W,) under which the token was sampled, or None if it was unmasked; valid until the next step.

        After the end of the text nothing is masked. Raises NotReproducedError.
        """
        if self._matcher.is_terminated():
            return None
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        if not 0 <= token < self._size or not int(self._bits[token // 32]) >> (token % 32) & 1:
            raise NotReproducedError(f"token {token} is barred")
        if not self._matcher.accept_token(token):
            raise NotReproducedError(f"token {token} is not accepted")
        return self._bits

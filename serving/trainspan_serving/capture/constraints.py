"""Reads how a generation was constrained, from vLLM's own parameters as they entered the engine, not from the request.

By then the endpoint has applied `tool_choice`, `strict`, `response_format` and the rest, and the stop tokens, the token
ids of banned words and the library chosen by validation are set.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from trainspan_schemas.errors import one_line
from trainspan_schemas.telemetry.constraints import MAX_CHARACTERS, REPLAYED_LIBRARY, Constraint, Grammar
from trainspan_serving.capture.grammar_trial import GrammarText, GrammarTooSlowError, GrammarTrial

__all__ = ["EngineConstraints", "is_constrained", "kind_of"]

_log = logging.getLogger(__name__)

_UNKNOWN = "unknown"
_LIBRARIES = {"guidance": "llguidance", "outlines": "outlines_core"}
"""vLLM's name of a backend → its distribution, if the two differ."""


class EngineConstraints:
    """Records the constraints of generations and the engine's grammar library.

    vLLM compiles all grammars with the library of the first request that had one, whatever it chooses for later ones.
    If it may choose (`auto`), `settle` makes that first request, so that the library is known: xgrammar.
    """

    def __init__(self, engine: Any, generate: Callable[..., AsyncGenerator[Any, None]]) -> None:
        self._engine, self._generate = engine, generate
        self._config = engine.vllm_config.structured_outputs_config
        self._library: str | None = None if self._config.backend == "auto" else str(self._config.backend)
        self._settling = asyncio.Lock()
        self._bounds: Any = None
        self._trial = GrammarTrial(self._serialized_tokenizer)
        self.requests = 0
        """Requests to the engine that `settle` has made."""

    @property
    def vocab_size(self) -> int:
        return int(self._engine.model_config.get_vocab_size())

    async def fix_library(self) -> None:
        """Returns when the library is fixed."""
        async with self._settling:
            if self._library is not None:
                return
            try:
                self._library = await self._first_request()
            except Exception as error:  # noqa: BLE001  # the client's own request gets the error
                self._library = _UNKNOWN
                _log.warning(
                    "the engine's grammar library is unknown: %s; constrained calls cannot be trained", one_line(error)
                )

    async def check(self, params: Any) -> None:
        """Tries the grammar of parameters that vLLM has not validated. Raises vLLM's error for a 400 if it costs too much.

        Only if xgrammar compiles it.
        """
        grammar = self._text_of(params.structured_outputs) if self._library == REPLAYED_LIBRARY else None
        if grammar is None:
            return
        try:
            await self._trial.check(grammar)
        except GrammarTooSlowError as error:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(str(error)) from None

    def _text_of(self, asked: Any) -> GrammarText | None:
        """None for what vLLM refuses, and for any JSON object."""
        from vllm.v1.structured_output.request import get_structured_output_key
        from vllm.v1.structured_output.utils import choice_as_grammar

        if isinstance(asked.choice, list):
            return GrammarText("ebnf", choice_as_grammar(asked.choice), any_whitespace=True)
        try:
            type_, spec = get_structured_output_key(asked)
        except ValueError:
            return None
        form = _form(type_.name.lower(), spec)
        return GrammarText(form, spec, any_whitespace=not self._config.disable_any_whitespace) if spec else None

    def _serialized_tokenizer(self) -> str:
        """Serializes the tokenizer as vLLM describes it to xgrammar."""
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        tokenizer = self._engine.input_processor.tokenizer
        backend = XgrammarBackend(self._engine.vllm_config, tokenizer=tokenizer, vocab_size=self.vocab_size)
        return str(backend.compiler.compile_regex("a").tokenizer_info.serialize_json())

    async def _first_request(self) -> str:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        ranks = self._engine.vllm_config.parallel_config.data_parallel_size
        libraries = set()
        for rank in range(ranks):
            asked = StructuredOutputsParams(regex="a")
            params = SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                structured_outputs=asked,
            )
            placement = {"data_parallel_rank": rank} if ranks > 1 else {}
            request_id = f"trainspan-grammar-{secrets.token_hex(8)}"
            self.requests += 1
            async for _ in self._generate(tokens_input([0]), params, request_id, **placement):
                pass
            libraries.add(str(asked._backend))  # validation writes it there
        return libraries.pop() if len(libraries) == 1 else _UNKNOWN

    def read(self, params: Any, asked: str | None) -> Constraint:
        """Reads parameters as they entered the engine; `asked` is the kind of grammar in the request."""
        others = {
            "min_tokens": params.min_tokens,
            "thinking_budget": params.thinking_token_budget is not None,
            "forced_tokens": params.trace_decode_token_ids,
            "logprob_token_ids": params.logprob_token_ids,
            "tokenizer": params.structured_outputs is not None and self._reads_tokens_otherwise(),
        }
        constraint = Constraint(
            grammar=self._grammar(params, asked) if params.structured_outputs is not None else None,
            allowed_ids=tuple(sorted(set(params.allowed_token_ids))) if params.allowed_token_ids else None,
            biases=tuple(sorted((int(token), float(bias)) for token, bias in (params.logit_bias or {}).items())),
            bad_words=tuple(tuple(word) for word in params.bad_words_token_ids or ()),
            others=tuple(name for name, given in others.items() if given),
        )
        return constraint if len(constraint.to_json()) <= MAX_CHARACTERS else Constraint(others=("too_large",))

    def _grammar(self, params: Any, asked: str | None) -> Grammar:
        from vllm.v1.structured_output.request import get_structured_output_key

        type_, spec = get_structured_output_key(params.structured_outputs)
        name = type_.name.lower()
        form, kind = _form(name, spec), "json_schema" if name == "json" else name
        if name == "json_object":
            spec = '{"type": "object"}'
        library = self._library or _UNKNOWN
        return Grammar(
            kind=asked or kind,
            form=form,
            spec=spec,
            library=library,
            version=_version(_LIBRARIES.get(library, library)),
            vocab_size=self.vocab_size,
            stop_ids=tuple(sorted(params.all_stop_token_ids)),
            any_whitespace=not self._config.disable_any_whitespace,
        )

    def _reads_tokens_otherwise(self) -> bool:
        """Whether vLLM describes the tokenizer to xgrammar differently than xgrammar reads a transformers tokenizer."""
        from vllm.utils.mistral import is_mistral_tokenizer

        kind = getattr(self._engine.model_config.hf_config, "model_type", None)
        return kind == "plamo3" or bool(is_mistral_tokenizer(self._engine.input_processor.tokenizer))

    def start(self, prompt: Sequence[int], ids: Sequence[int], params: Any, options: Mapping[str, Any]) -> int | None:
        """Counts the sampled `ids` before the first one that the grammar masked: the reasoning tokens.

        None if a token that was not masked was fed to the grammar. `options` are those of the generation.
        """
        bounds = self._reasoning_bounds()
        if bounds is None or params.structured_outputs is None:
            return 0
        from vllm.v1.structured_output.request import StructuredOutputRequest

        asked = StructuredOutputRequest(
            params.structured_outputs,
            reasoning_ended=options.get("reasoning_ended"),
            reasoning_parser_kwargs=options.get("reasoning_parser_kwargs"),
        )
        request = SimpleNamespace(
            structured_output_request=asked, prompt_token_ids=list(prompt), all_token_ids=list(prompt)
        )
        if bounds(request, ()).constraint_start == 0:
            return 0
        for position, token in enumerate(ids):
            request.all_token_ids.append(token)
            fed = bounds(request, [token], spec_tokens_committed=True).grammar_start
            if fed == 0:
                return None
            if fed == 1:
                return position + 1
        return len(ids)

    def _reasoning_bounds(self) -> Any:
        """Returns vLLM's own method that finds the end of reasoning; None if grammars apply from the first token."""
        config = self._config
        if not config.reasoning_parser or config.enable_in_reasoning:
            return None
        if self._bounds is None:
            from vllm.reasoning import ReasoningParserManager
            from vllm.v1.structured_output import StructuredOutputManager

            manager = StructuredOutputManager.__new__(StructuredOutputManager)
            manager.enable_in_reasoning = False
            manager.tokenizer = self._engine.input_processor.tokenizer
            manager.reasoner_cls = ReasoningParserManager.get_reasoning_parser(config.reasoning_parser)
            self._bounds = manager._get_constraint_bounds
        return self._bounds


def kind_of(params: Any) -> str | None:
    """Returns `choice` for a request with choices, which validation turns into a grammar."""
    asked = params.structured_outputs
    return "choice" if asked is not None and asked.choice is not None else None


def is_constrained(params: Any) -> bool:
    """Whether anything but temperature, top_p, top_k and min_p shaped the distribution that was sampled from."""
    return bool(
        params.structured_outputs is not None
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.min_tokens
        or params.thinking_token_budget is not None
        or params.trace_decode_token_ids
        or params.logprob_token_ids
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def _form(name: str, spec: str) -> str:
    """Returns the form of the grammar that vLLM calls `name`."""
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    if name == "grammar":
        return "lark" if grammar_is_likely_lark(spec) else "ebnf"
    return "json_schema" if name in ("json", "json_object") else name


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return _UNKNOWN

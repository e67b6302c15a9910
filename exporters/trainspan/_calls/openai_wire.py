"""Rewrites requests to and reads responses from a policy server that does not capture calls; bytes in, bytes out.

The rewritten request asks for token ids and log-probabilities; those that the client did not ask for are removed from
the response. Formats: OpenAI's chat and text completions, with vLLM's `return_token_ids`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainspan._guard import guarded
from trainspan_schemas.files.durable import JsonObject

__all__ = ["ChoiceParts", "GenerationRequest", "ResponseCollector", "question_of"]

_TOKEN_KEYS = ("token_ids", "prompt_token_ids")


@dataclass(slots=True)
class ChoiceParts:
    """One choice, as far as it has arrived."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A generation request."""

    request: Mapping[str, Any]
    content: bytes
    """The request with our extra fields."""
    hides_logprobs: bool
    hides_ids: bool
    is_chat: bool

    @property
    def n_choices(self) -> int:
        """The number of choices asked for: `n` for each prompt."""
        n, prompt = self.request.get("n"), self.request.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt) else 1
        return prompts * max(1, n if isinstance(n, int) else 1)


def question_of(path: str, content: bytes) -> GenerationRequest | None:
    """Returns the request to send; None if the endpoint has no token ids or `content` is not a JSON object."""
    is_chat = path.rstrip("/").endswith("/chat/completions")
    if not is_chat and not path.rstrip("/").endswith("/completions"):
        return None
    try:
        request = json.loads(content)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    asked = dict(request)
    given = request.get("logprobs")  # 0 is a request: the sampled token's alone
    hides_logprobs = given is None or given is False
    if hides_logprobs:
        asked["logprobs"] = True if is_chat else 1
    hides_ids = not request.get("return_token_ids")
    asked["return_token_ids"] = True
    return GenerationRequest(request, _dump(asked), hides_logprobs, hides_ids, is_chat)


@dataclass(slots=True)
class ResponseCollector:
    """Collects a response, whole or in pieces, and restores it to what the client expects."""

    question: GenerationRequest
    response_id: str | None = None
    model: str | None = None
    choices: dict[int, ChoiceParts] = field(default_factory=dict)
    _rest: bytes = b""
    _after_filler: bool = False

    def whole(self, content: bytes) -> bytes:
        """Rewrites a JSON response; anything else passes through unchanged."""
        return self._passed(content) or content

    def piece(self, data: bytes) -> bytes:
        """Returns the server-sent events that `data` completes; `data` may be split anywhere."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return b"".join(self._line(line) for line in lines)

    def end(self) -> bytes:
        """Returns the rest at the end of the stream."""
        return self._line(self._rest)[:-1] if self._rest else b""

    @property
    def finished(self) -> bool:
        """Whether every choice has arrived, although the client may go on reading, or stop here."""
        arrived = sum(choice.finish_reason is not None for choice in self.choices.values())
        return arrived >= self.question.n_choices

    def _line(self, line: bytes) -> bytes:
        after_filler, self._after_filler = self._after_filler, False
        if after_filler and not line.strip():
            return b""
        payload = line[5:].strip()
        if not line.startswith(b"data:") or not payload.startswith(b"{"):
            return line + b"\n"
        passed = self._passed(payload)
        if passed is None:
            return line + b"\n"
        self._after_filler = not passed
        return b"data: " + passed + line[len(line.rstrip()) :] + b"\n" if passed else b""

    @guarded
    def _passed(self, content: bytes) -> bytes:
        """Removes what the client did not ask for from a response or an event; returns b"" if nothing remains."""
        body = json.loads(content)
        self._take(body)
        return b"" if self._is_filler(body) else _dump(self._hidden(body))

    def _is_filler(self, body: Mapping[str, Any]) -> bool:
        """Whether this event carries only token ids, which vLLM sends for tokens that do not form text yet."""
        entries = body.get("choices") or ()
        return (
            self.question.hides_ids
            and self.question.hides_logprobs
            and bool(entries)
            and all(entry.get("delta") == {} and entry.get("finish_reason") is None for entry in entries)
        )

    def _take(self, body: Mapping[str, Any]) -> None:
        self.response_id = body.get("id") or self.response_id
        self.model = body.get("model") or self.model
        for entry in body.get("choices") or ():
            choice = self.choices.setdefault(entry.get("index", 0), ChoiceParts())
            choice.prompt_ids = entry.get("prompt_token_ids") or body.get("prompt_token_ids") or choice.prompt_ids
            choice.ids += entry.get("token_ids") or ()
            choice.logprobs += _logprobs(entry.get("logprobs"))
            choice.finish_reason = entry.get("finish_reason") or choice.finish_reason
        if prompt_ids := body.get("prompt_token_ids"):
            for choice in self.choices.values():
                choice.prompt_ids = prompt_ids

    def _hidden(self, body: JsonObject) -> JsonObject:
        entries = [entry for entry in body.get("choices") or () if isinstance(entry, dict)]
        for holder in (body, *entries):
            for key in _TOKEN_KEYS if self.question.hides_ids else ():
                if key in holder:
                    holder[key] = None
        if self.question.hides_logprobs:
            for entry in entries:
                if "logprobs" in entry:
                    entry["logprobs"] = None
        return body


def _logprobs(given: Any) -> list[float]:
    """Returns the sampled tokens' log-probabilities: chat has one entry per token, completions one list."""
    if not isinstance(given, dict):
        return []
    if given.get("token_logprobs") is not None:
        return [float(value) for value in given["token_logprobs"] if value is not None]
    return [float(entry["logprob"]) for entry in given.get("content") or ()]


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()  # ASCII, which half characters are in too

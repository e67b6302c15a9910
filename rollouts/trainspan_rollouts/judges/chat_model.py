"""A judge model: an endpoint with the chat completions API, and the cache of its answers."""

import contextlib
import hashlib
import json
import logging
import os
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from trainspan_schemas.errors import ConfigError, InvalidRecordError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.home import make_home
from trainspan_schemas.http_client import ask

__all__ = ["CACHE_FILE", "ChatEndpoint", "ChatModel"]

CACHE_FILE: Final = "judge-answers.sqlite"
"""In the state folder."""
MAX_CACHED: Final = 200_000
"""Answers; older ones are deleted."""
_MAX_BYTES: Final = 2**22
_FIRST_DELAY_S: Final = 0.5
_AGAIN: Final = (408, 409, 425, 429)
_STRIPES: Final = 1024

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """A model behind the chat completions API, as a judge's file names it."""

    where: str
    """The file, and the part of it, for messages."""
    model: str
    base_url: str
    """Ends in `/v1` for most."""
    api_key_env: str | None = None
    """The environment variable with the key; None: no key is sent."""
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the endpoint is asked for JSON."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as `temperature`."""

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if not self.model:
            raise ConfigError(f"{self.where} has no model")
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{self.where}: base_url = {self.base_url!r}: write that of an endpoint, such as http://127.0.0.1:8001/v1"
            )


class ChatModel:
    """Asks the model of an endpoint. Thread-safe: equal questions at the same time are one request."""

    def __init__(self, endpoint: ChatEndpoint, timeout_s: float) -> None:
        """Raises ConfigError if the variable of its key is not set, or has what no header can have."""
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._url = f"{endpoint.base_url.rstrip('/')}/chat/completions"
        self._key = os.environ.get(endpoint.api_key_env, "").strip() if endpoint.api_key_env else None
        if self._key == "":
            raise ConfigError(
                f"{endpoint.where}: the environment variable {endpoint.api_key_env} with the judge's key is not set"
            )
        if self._key and not (
            self._key.isascii() and self._key.isprintable()
        ):  # the error of a bad header would show it
            raise ConfigError(
                f"{endpoint.where}: the judge's key in {endpoint.api_key_env} has characters that no key can have"
            )
        self.secrets = frozenset(filter(None, [endpoint.api_key_env]))
        """The variables that no agent may get."""
        self._cache = _Cache(make_home() / CACHE_FILE)
        self._lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        self._counts: Counter[str] = Counter()

    def figures(self) -> dict[str, float]:
        """The numbers of `requests`, of answers that were `cached`, and of tokens so far."""
        with self._lock:
            return {name: self._counts[name] for name in ("requests", "cached", "prompt_tokens", "completion_tokens")}

    def answer(
        self, messages: list[dict[str, str]], schema: Mapping[str, Any], vote: int, parse: Callable[[str], _T]
    ) -> _T:
        """The parsed answer, of the cache if the same was asked as the same vote. Only answers that parse are cached.

        Raises ConnectionError if the endpoint does not answer in time or refuses, and what `parse` raises.
        """
        body: JsonObject = {**self._endpoint.request, "model": self._endpoint.model, "messages": messages}
        if self._endpoint.response_format == "json_schema":
            verdict_schema = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": verdict_schema}
        elif self._endpoint.response_format == "json_object":
            body["response_format"] = {"type": "json_object"}
        data = json.dumps(body).encode()
        key = hashlib.sha256(f"{self._url}\n{vote}\n".encode() + data).hexdigest()
        with self._stripes[int(key, 16) % _STRIPES]:
            text = self._cache.get(key)
            if text is not None:
                self._count(cached=1)
                return parse(text)
            text = self._ask(data)
            parsed = parse(text)
            self._cache.put(key, text)
        return parsed

    def _ask(self, data: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        deadline_s, delay_s = time.monotonic() + self._timeout_s, _FIRST_DELAY_S
        while True:
            left_s = max(0.1, deadline_s - time.monotonic())
            after_s = delay_s * random.uniform(1, 1.5)
            self._count(requests=1)
            try:
                answer = ask(self._url, data, headers, timeout_s=left_s, max_bytes=_MAX_BYTES, through_proxy=True)
            except ConnectionError as error:
                failure = str(error)
            else:
                if answer.is_ok:
                    return self._content(answer.body)
                failure = f"answered {answer.status}: {answer.text}"
                if answer.status < 500 and answer.status not in _AGAIN:
                    raise ConnectionError(self._without_key(f"{self._url} {failure}"))
                with contextlib.suppress(TypeError, ValueError):
                    after_s = max(after_s, float(answer.retry_after))  # type: ignore[arg-type]
            if time.monotonic() + after_s >= deadline_s:
                raise ConnectionError(self._without_key(f"{self._url} {failure}"))
            time.sleep(after_s)
            delay_s *= 2

    def _content(self, body: bytes) -> str:
        """The text of the answer. Raises InvalidRecordError if there is none, or it was cut off."""
        try:
            record = json.loads(body)
            choice = record["choices"][0]
            message, content = choice["message"], choice["message"].get("content")
            usage = record.get("usage") or {}
            self._count(**{name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")})
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRecordError(
                self._without_key(f"{self._url} gave no chat completion: {body[:200]!r}")
            ) from error
        if message.get("refusal"):
            raise InvalidRecordError(self._without_key(f"the judge model refused: {message['refusal']}"))
        if choice.get("finish_reason") == "length":
            raise InvalidRecordError(
                "the judge model's answer was cut off: raise max_tokens in [request], or max_completions_tokens"
            )
        if not isinstance(content, str):
            raise InvalidRecordError(self._without_key(f"the judge model's answer has no text: {body[:200]!r}"))
        return content

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


class _Cache:
    """Question → answer, in a file that several processes share. What fails in it is logged once, and costs only requests."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        try:
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
            self._connection = sqlite3.connect(file, timeout=10, isolation_level=None, check_same_thread=False)
            self._connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT UNIQUE, answer TEXT)")
        except (OSError, sqlite3.Error) as error:
            self._fail(error)

    def get(self, key: str) -> str | None:
        with self._lock:
            row = self._execute("SELECT answer FROM answers WHERE key = ?", key)
        return None if row is None else str(row[0])

    def put(self, key: str, answer: str) -> None:
        with self._lock:
            self._execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", key, answer)
            self._execute("DELETE FROM answers WHERE rowid <= (SELECT max(rowid) FROM answers) - ?", MAX_CACHED)

    def _execute(self, statement: str, *values: str | int) -> Any:
        if self._connection is None:
            return None
        try:
            return self._connection.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        self._connection = None
        _log.warning("event=judge_cache_off file=%s error=%s: every verdict is asked for", self._file, error)

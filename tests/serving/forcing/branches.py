"""Calls of a rollout to a real policy server, and the branch that repeats them."""

import json
import re
import secrets
import urllib.error
import urllib.request
from typing import Any

from tests.serving.support.servers import Stack
from tests.support.otlp.sink import ReceivedSpan
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, TraceParent
from trainspan_schemas.telemetry.prefix import (
    PREFIX_PATH,
    ForcedCall,
    ForcedChoice,
    ForcedPrefix,
    prompt_digest,
    signed_request,
)
from trainspan_schemas.telemetry.signing import KEY_FILE, signing_key

__all__ = ["Rollout", "anonymous", "calls_of", "prefix_of"]


class Rollout:
    """A rollout of a runner: its identity is signed, and it has a trace of its own."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.key = signing_key(str(stack.server.home / KEY_FILE))
        self.parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
        self.identity = Identity(f"rollout-{secrets.token_hex(4)}", "run", "task", 0, 1).signed(self.key, self.parent)

    def ask(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Returns status and body of the response, exactly as sent."""
        own = {"traceparent": str(self.parent), "baggage": self.identity.to_baggage()} if headers is None else headers
        status, text, _ = self.send(path, json.dumps({"model": "policy", **body}).encode(), own)
        return status, text

    def send(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, Any]:
        url, content = self.stack.server.url + path, {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, body, {**content, **headers}), timeout=60
            ) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers

    def request(self, path: str, body: bytes, key: bytes | None = None) -> tuple[int, Any]:
        """A request of the runner about prefixes."""
        status, text, _ = self.send(path, body, signed_request(key or self.key, path, body))
        return status, json.loads(text)

    def register(self, prefix: ForcedPrefix) -> None:
        status, answer = self.request(PREFIX_PATH, prefix.to_json())
        assert status == 200, answer

    def end(self) -> Any:
        body = json.dumps({"rollout": self.identity.rollout_id, "attempt": self.identity.attempt}).encode()
        status, answer = self.request(f"{PREFIX_PATH}/end", body)
        assert status == 200, answer
        return answer

    def spans(self, count: int) -> list[ReceivedSpan]:
        found = self.stack.sink.wait(count, lambda span: span.trace_id == self.parent.trace_id)
        return sorted(found, key=lambda span: (span.attributes[keys.CALL_INDEX], span.attributes[keys.CHOICE_INDEX]))


def calls_of(spans: list[ReceivedSpan]) -> list[ForcedCall]:
    """The stored calls: one per call index and prompt."""
    found: dict[tuple[int, bytes], list[ReceivedSpan]] = {}
    for span in spans:
        found.setdefault((span.attributes[keys.CALL_INDEX], span.attributes[keys.PROMPT_TOKEN_IDS]), []).append(span)
    return [
        ForcedCall(
            index,
            prompt,
            tuple(
                ForcedChoice(
                    span.attributes[keys.COMPLETION_TOKEN_IDS],
                    span.attributes[keys.COMPLETION_LOGPROBS],
                    span.attributes[keys.GEN_AI_FINISH_REASONS][0],
                )
                for span in choices
            ),
            choices[0].attributes[keys.POLICY_VERSION],
        )
        for (index, prompt), choices in found.items()
    ]


def prefix_of(rollout: Rollout, calls: list[ForcedCall], forced: int, lives_s: float = 600.0) -> ForcedPrefix:
    """The first `forced` of a rollout's calls, for another rollout."""
    identity = rollout.identity
    point = calls[forced].prompt if forced < len(calls) else b""
    later = tuple(prompt_digest(call.prompt) for call in calls[forced:])
    return ForcedPrefix(
        identity.rollout_id, identity.attempt, rollout.parent.trace_id, tuple(calls[:forced]), later, point, lives_s
    )


def anonymous(text: str) -> str:
    """A response without what differs between two equal ones: ids and times."""
    text = re.sub(r'"(created|created_at|completed_at)": ?[\d.]+', r'"\1":0', text)
    return re.sub(r"(chatcmpl-tool|chatcmpl|cmpl|resp|msg|rs|call|fc|ts|call_id|item)[-_][0-9a-f-]{8,}", r"\1-0", text)

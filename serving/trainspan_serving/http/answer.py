"""The response to a client: vLLM's own with the policy version, or the reason why the server ended the request."""

import json
from urllib.parse import quote

from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys
from trainspan_serving.capture.engine_tap import Exchange
from trainspan_serving.capture.tool_use import tool_calls_in_answer
from trainspan_serving.http.asgi import Message, Receive, Send

__all__ = ["AnswerStream"]


class AnswerStream:
    """Sits between the application and the client of one exchange; tracks whether a complete 200 response was sent."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        exchange: Exchange,
        *,
        is_one_of_several: bool,
    ) -> None:
        """`is_one_of_several`: whether the response names the policy, too, because the server has several."""
        self._is_one_of_several = is_one_of_several
        self._receive, self._send, self._exchange = receive, send, exchange
        self._good = self._gone = self._is_stream = False
        self.delivered = False
        self._is_ended = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._gone |= message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        if self._exchange.is_cut and self._is_stream:
            await self.end_stream()
            return
        if message["type"] == "http.response.start":
            message = self._started(message)
        elif message["type"] == "http.response.body" and self._good:
            for choice, call_id in tool_calls_in_answer(message.get("body", b"")):
                self._exchange.tool_calls.setdefault(choice, {})[call_id] = None
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        gone = self._gone
        await self._send(message)
        if last:
            self.delivered = self._good and not gone

    async def end_stream(self) -> bool:
        """Ends a stream that the server cut off with an error event of its protocol; returns False if there is none.

        vLLM 0.32 cannot send an error event in a stream of `/v1/responses` or `/v1/messages` itself.
        """
        if not (self._exchange.is_cut and self._is_stream):
            return False
        if not self._is_ended:
            self._is_ended = True
            exchange = self._exchange
            text = _error_event(exchange.endpoint, str(exchange.ended_because), exchange.ended_status)
            await self._send({"type": "http.response.body", "body": text.encode()})
        return True

    def _started(self, message: Message) -> Message:
        headers = list(message.get("headers", ()))
        self._good = message["status"] == 200
        self._is_stream = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
        )
        policy = self._exchange.policy
        if self._is_one_of_several:
            headers.append((keys.HEADER_POLICY.encode(), quote(policy.name).encode()))
        headers.append((keys.HEADER_POLICY_VERSION.encode(), str(policy.version).encode()))
        headers.append((keys.HEADER_CALL.encode(), self._exchange.span_id.encode()))
        if self._exchange.is_cut and message["status"] == 503:
            headers.append((b"retry-after", b"1"))
        elif self._exchange.is_cut:
            headers.append((b"x-should-retry", b"false"))  # read by the clients of OpenAI and Anthropic
        return {**message, "headers": headers}


def _error_event(endpoint: str, why: str, status: int) -> str:
    """Returns the last event of a stream, as OpenAI's and Anthropic's clients expect it."""
    is_ours = status == 503
    if endpoint == "/v1/messages":
        error: JsonObject = {"type": "overloaded_error" if is_ours else "invalid_request_error", "message": why}
        return f"event: error\ndata: {json.dumps({'type': 'error', 'error': error})}\n\n"
    if endpoint == "/v1/responses":
        code = "server_error" if is_ours else "invalid_prompt"
        event = {"type": "error", "code": code, "message": why, "param": None, "sequence_number": 0}
        return f"event: error\ndata: {json.dumps(event)}\n\n"
    type_ = "ServiceUnavailableError" if is_ours else "UnprocessableEntityError"
    error = {"message": why, "type": type_, "param": None, "code": status}
    return f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n"

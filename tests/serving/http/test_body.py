"""Request bodies from an ASGI server: whole, in pieces, too long, too slow, or cut off in the middle."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from trainspan_serving.http.body import BodyError, ClientGoneError, check_json, read_body, replayed
from trainspan_serving.swap.gate import Gate

Receive = Callable[[], Awaitable[dict[str, Any]]]


def received(*messages: dict[str, Any] | float) -> Receive:
    """Returns a `receive` that yields the messages, sleeping for the seconds between them, and then blocks."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        while left and isinstance(left[0], float):
            await asyncio.sleep(left.pop(0))  # type: ignore[arg-type]
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)  # type: ignore[return-value]

    return receive


def piece(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


def read(receive: Receive, length: bytes | None = None, *, max_bytes: int = 10, timeout_s: float = 5.0) -> bytes:
    headers = [] if length is None else [(b"content-length", length)]
    return asyncio.run(read_body({"headers": headers}, receive, max_bytes=max_bytes, timeout_s=timeout_s))


def test_pieces_make_the_body() -> None:
    assert read(received(piece(b"abc"), piece(b""), piece(b"de", more=False))) == b"abcde"
    assert read(received(piece(b"", more=False))) == b""
    assert read(received({"type": "http.request"})) == b""
    assert read(received(piece(b"0123456789", more=False)), b"10") == b"0123456789"


@pytest.mark.parametrize("length", [b"11", b"9" * 5000])
def test_a_body_with_too_large_a_content_length_is_refused_unread(length: bytes) -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("asked for the body")

    with pytest.raises(BodyError, match="the body is longer than 10 bytes") as caught:
        read(receive, length)
    assert caught.value.status == 413


def test_a_chunked_body_is_refused_at_the_first_byte_over_the_limit() -> None:
    with pytest.raises(BodyError, match="longer than 10 bytes"):
        read(received(piece(b"01234"), piece(b"56789"), piece(b"x")))


def test_a_slow_body_has_one_timeout_not_one_per_piece() -> None:
    with pytest.raises(BodyError, match=r"did not arrive within 0\.1 s; got [12] bytes of it") as caught:
        read(received(piece(b"a"), 0.06, piece(b"b"), 0.06, piece(b"c"), 0.06, piece(b"d")), timeout_s=0.1)
    assert caught.value.status == 408


@pytest.mark.parametrize("before", [(), (piece(b"ab"),)])
def test_a_client_that_leaves_before_its_body_is_whole_is_not_answered(before: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(ClientGoneError):
        read(received(*before, GONE))


def test_the_application_gets_the_body_once_and_then_what_follows() -> None:
    async def messages() -> list[Any]:
        receive = replayed(b"abc", received(GONE))
        return [await receive(), await receive()]

    assert asyncio.run(messages()) == [piece(b"abc", more=False), GONE]


def test_a_forgotten_request_may_leave_later_without_affecting_others() -> None:
    async def run() -> list[object]:
        gate = Gate()
        stuck = await gate.enter(1)
        assert stuck is not None
        seen: list[object] = [await gate.close(0.0), gate.in_flight]
        gate.forget()
        seen += [gate.in_flight, await gate.close(0.0), await gate.enter(0.01), gate.refused]
        gate.open()
        other = await gate.enter(1)
        gate.leave(stuck)
        seen += [gate.in_flight, await gate.close(0.01)]
        assert other is not None
        gate.leave(other)
        return [*seen, await gate.close(0.01)]

    assert asyncio.run(run()) == [False, 1, 0, True, None, 1, 1, False, True]


def check(body: bytes, kind: bytes | None = b"application/json") -> None:
    check_json({"headers": [] if kind is None else [(b"content-type", kind)]}, body)


MALFORMED: dict[str, bytes] = {
    "is not JSON": b'{"a": ',
    "more than 100 levels": b"[" * 100_000,
    "levels of lists": b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
    "is not UTF-8: byte 7": b'{"a": "\xff"}',
    "is not UTF-8: byte 0": '{"a": 1}'.encode("utf-16"),
    "half a character": b'{"model": "\\ud83d"}',
    "the number NaN is not finite": b'{"temperature": NaN}',
    "the number 1e999 is not finite": b'{"temperature": 1e999}',
    "does not fit into 64 bits": b'{"seed": ' + b"9" * 5000 + b"}",
    "the integer 9223372036854775808 does not": b'{"prompt": [9223372036854775808]}',
    "not a list": b"[1]",
    "not a str": b'"text"',
}


@pytest.mark.parametrize("message", MALFORMED)
def test_a_malformed_body_is_refused_by_name(message: str) -> None:
    with pytest.raises(BodyError, match=message) as caught:
        check(MALFORMED[message])
    assert caught.value.status == 400


def test_other_bodies_are_left_to_vllm() -> None:
    check(b'{"tools": [{"function": {"parameters": {"maximum": 18446744073709551615}}}], "seed": 9223372036854775807}')
    check(
        b'{"text": {"format": {"schema": {"maximum": 18446744073709551615}}}, "input": [{"x": 18446744073709551615}]}'
    )
    check(b"")
    check(b" \n")
    check(b"\xff", b"multipart/form-data; boundary=x")
    check(
        '{"a": "é\\ud83d\\ude00", "b": [1e300, -9223372036854775808, 9223372036854775807], "c": "NaN 1e999"}'.encode()
    )
    check(b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}", b"Application/JSON; charset=utf-8")
    check(b'{"a": 1}', None)

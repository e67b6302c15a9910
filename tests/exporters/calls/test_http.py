"""Recognizing the policy's requests, and the parent that they name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider

from trainspan._calls import policy_request
from trainspan._rollout.scope import Scope, remote_span
from trainspan._rollout.span_processor import invoked_agent, stamp_spans_of
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, TraceParent, parse_baggage

HERE = TraceParent("a" * 32, "1" * 16)
ELSEWHERE = TraceParent("b" * 32, "2" * 16)
URL = "http://policy:8000/v1/chat/completions"


@pytest.fixture
def scope(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scope]:
    """Sets up a current rollout with span HERE, and a policy at http://policy:8000."""
    monkeypatch.setenv("TRAINSPAN_POLICY_URL", "http://policy:8000/v1")
    scope = Scope(Identity("r1"), "runner", remote_span(HERE))
    token = context.attach(scope.enter(Context()))
    yield scope
    context.detach(token)


@pytest.mark.parametrize(
    ("policy", "url", "expected"),
    [
        ("http://policy:8000/v1", "http://policy:8000/other", True),
        ("http://policy/v1", "http://policy:80/v1", True),
        ("https://policy/v1", "http://policy/v1", False),
        ("http://policy:8000/v1", "http://policy:8001/v1", False),
        ("http://policy:8000/v1", "http://policy.evil:8000/v1", False),
        ("http://policy:8000", "http://policy:8000@evil/v1", False),
        ("http://localhost:8000/v1", "http://127.0.0.1:8000/v1", True),
        ("http://[::1]:8000/v1", "http://localhost:8000/v1", True),
        ("policy:8000", "http://policy:8000/v1", False),
        ("http://policy:port", "http://policy:8000/v1", False),
        ("", "http://policy:8000/v1", False),
    ],
)
def test_the_policy_is_recognized_by_its_origin(
    monkeypatch: pytest.MonkeyPatch, policy: str, url: str, expected: bool
) -> None:
    monkeypatch.delenv("TRAINSPAN_POLICY_URL", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", policy)
    assert policy_request.is_policy(url) is expected


def test_the_policy_url_variable_wins_over_the_base_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_POLICY_URL", "http://policy:8000")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://api.example.com/v1")
    assert policy_request.is_policy(URL)
    assert not policy_request.is_policy("https://api.example.com/v1/chat/completions")


@pytest.mark.parametrize(
    ("url", "headers", "sent"),
    [
        pytest.param(URL, {}, HERE, id="none: the current span"),
        pytest.param(URL, {"traceparent": str(TraceParent("a" * 32, "9" * 16))}, TraceParent("a" * 32, "9" * 16), id="kept"),
        pytest.param(URL, {"traceparent": str(ELSEWHERE)}, HERE, id="of another trace"),
        pytest.param(URL, {"traceparent": "nonsense"}, HERE, id="malformed"),
        pytest.param(
            f"http://policy:8000/rollout/{ELSEWHERE}/v1/chat/completions", {}, ELSEWHERE, id="the URL names another trace"
        ),
        pytest.param(
            f"http://policy:8000/rollout/{TraceParent('a' * 32, '8' * 16)}/v1/chat/completions", {}, HERE,
            id="the URL names the same trace",
        ),
        pytest.param(URL, {"authorization": f"Bearer trainspan-{ELSEWHERE}-secret"}, ELSEWHERE, id="the key names one"),
        pytest.param(URL, {"authorization": "Bearer trainspan"}, HERE, id="a key that names none"),
    ],
)  # fmt: skip
def test_a_request_names_a_parent_that_the_server_accepts(
    scope: Scope, url: str, headers: dict[str, str], sent: TraceParent
) -> None:
    policy_request.prepare("POST", url, headers)
    assert TraceParent.parse(headers["traceparent"]) == sent


def test_identity_is_added_to_existing_baggage_and_replaces_an_older_identity(scope: Scope) -> None:
    headers = {"baggage": f"mine=1;p=2,{Identity('old').to_baggage()}"}
    policy_request.prepare("POST", URL, headers)
    assert headers["baggage"].startswith("mine=1;p=2,")
    assert parse_baggage(headers["baggage"]) == {
        "mine": "1",
        keys.ROLLOUT_ID: "r1",
        keys.ATTEMPT: "0",
        keys.SPLIT: "train",
        keys.CLOCK: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    }


def test_responses_count_as_calls_only_if_something_was_generated(scope: Scope) -> None:
    def sent(method: str, path: str, status: int | None) -> tuple[int, bool]:
        request = policy_request.prepare(method, f"http://policy:8000{path}", {})
        policy_request.failed(request) if status is None else policy_request.answered(request, status, {})
        return scope.calls, scope.policy_failing

    assert sent("POST", "/v1/chat/completions", 200) == (1, False)
    assert sent("post", "/v1/responses", 200) == (2, False)
    assert sent("POST", f"/rollout/{HERE}/v1/completions", 200) == (3, False)
    assert sent("POST", "/v1/messages", 503) == (3, True)
    assert sent("GET", "/v1/models", 200) == (3, True)
    assert sent("POST", "/v1/chat/completions", 400) == (3, False)
    assert sent("POST", "/v1/chat/completions", None) == (3, True)
    assert sent("POST", "/v1/chat/completions", 200) == (4, False)


def test_the_invoked_agent_is_that_of_the_nearest_invoke_agent_span() -> None:
    provider = TracerProvider()
    assert stamp_spans_of(provider)
    tracer = provider.get_tracer("framework")

    def agent(name: str) -> dict[str, str]:
        return {keys.GEN_AI_OPERATION: "invoke_agent", keys.GEN_AI_AGENT_NAME: name}

    assert invoked_agent() is None
    with tracer.start_as_current_span("outer", attributes=agent("planner")), tracer.start_as_current_span("step"):
        assert invoked_agent() == "planner"
        with tracer.start_as_current_span("inner") as inner:
            inner.set_attributes(agent("writer"))  # frameworks may name the agent after the start
            with tracer.start_as_current_span("chat"):
                assert invoked_agent() == "writer"
        assert invoked_agent() == "planner"
    assert invoked_agent() is None


@pytest.mark.parametrize(
    ("span", "attributes", "name"),
    [
        ("planner.run", {"openinference.span.kind": "AGENT", "agent.name": "planner"}, "planner"),
        ("planner.run", {"openinference.span.kind": "AGENT"}, "planner"),
        ("planner.on_messages_stream", {"openinference.span.kind": "AGENT"}, "planner"),
        ("planner.run", {"openinference.span.kind": "CHAIN"}, None),
        ("planner.agent", {"traceloop.span.kind": "agent", "traceloop.entity.name": "planner"}, "planner"),
        ("planner.agent", {"traceloop.span.kind": "task", "traceloop.entity.name": "planner"}, None),
    ],
)
def test_spans_of_other_conventions_name_their_agent(span: str, attributes: dict[str, str], name: str | None) -> None:
    provider = TracerProvider()
    stamp_spans_of(provider)
    tracer = provider.get_tracer("framework")
    with tracer.start_as_current_span(span, attributes=attributes), tracer.start_as_current_span("chat"):
        assert invoked_agent() == name


def test_identity_comes_from_the_parent_span_if_the_context_has_lost_it() -> None:
    provider = TracerProvider()
    stamp_spans_of(provider)
    stamp_spans_of(provider)  # once is enough
    tracer = provider.get_tracer("framework")
    identity = Identity("r1", task_id="t1")
    parent = tracer.start_span("parent", attributes=identity.attributes())
    child = tracer.start_span("child", context=trace.set_span_in_context(parent, Context()))
    stranger = tracer.start_span("stranger", context=Context())
    assert dict(child.attributes or {}) == identity.attributes()  # type: ignore[attr-defined]
    assert not stranger.attributes  # type: ignore[attr-defined]

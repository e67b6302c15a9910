"""Forbidden data never reaches the journal: secrets in headers, and keys blocked by the user."""

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.collector.process import (
    ANY_PORT,
    LOGS,
    Attribute,
    any_value,
    event,
    export,
    key_values,
    read,
    running,
    send,
    span,
    trace_request,
)
from tests.support.otlp.http import request
from trainspan_collector.receive.redaction import Redaction
from trainspan_schemas.telemetry import keys

SECRET = "sk-very-secret-0123456789"


def _after(attributes: Mapping[str, Attribute], *blocked: str) -> dict[str, Any]:
    """The remaining attributes of a span, by key."""
    message = trace_request(span(1, 1, attributes))
    body = Redaction(blocked).apply(message, message.SerializeToString()).body
    left = type(message).FromString(body).resource_spans[0].scope_spans[0].spans[0].attributes
    return {pair.key: pair.value for pair in left}


@pytest.mark.parametrize(
    "key",
    [
        "gen_ai.headers",
        "gen_ai.request.headers",
        "authorization",
        "Authorization",
        "http.request.header.authorization",
        "http.request.header.proxy-authorization",
        "http.request.header.x-api-key",
        "llm.api_key",
        "http.request.header.cookie",
        "http.response.header.set-cookie",
        "AUTHORIZATION",
        "Proxy-Authorization",
        "Cookie",
        "Set-Cookie",
        "X-API-Key",
        "OPENAI_API_KEY",
        "Gen_AI.Request.HEADERS",
        "apiKey",
        "llm.openaiApiKey",
        "http.request.header.xApiKey",
        "APIKEY",
        "cOoKiE",
        "X-Auth-Token",
        "http.request.header.x-auth-token",
    ],
)
@pytest.mark.parametrize("value", [SECRET, [SECRET], {"authorization": SECRET}])
def test_a_secret_attribute_is_gone_and_leaves_no_mark(key: str, value: Attribute) -> None:
    assert set(_after({key: value, "kept": 1})) == {"kept"}


@pytest.mark.parametrize(
    "text",
    [
        '{"headers": {"Authorization": "Bearer %s", "x": 1}}',
        "{'authorization': 'Bearer %s'}",
        "authorization: Bearer %s",
        'Authorization="Basic %s"',
        r"{\"extra_headers\": {\"Authorization\": \"Bearer %s\"}}",
        "[('Authorization', 'Bearer %s')]",
        "AUTHORIZATION: BEARER %s",
        "authorization=bearer %s, x",
        'authorization : "Basic  %s"',
        r"authorization\\\" : \\\" bearer %s\\\"",
        "authorization,\tbearer\n%s}",
        f"authorization:{' ' * 2**20}bearer{' ' * 2**20}%s",
        '{"headers": {"x-api-key": "%s", "x": 1}}',
        "{'X-API-Key': '%s'}",
        r"{\"x-api-key\": \"%s\"}",
        "curl -H x-api-key:%s https://api.example",
        "[('x-api-key', '%s')]",
        "{'api-key': '%s'}",
        "client = OpenAI(api_key='%s')",
        "OPENAI_API_KEY=%s python agent.py",
        '[["authorization","Bearer %s"], ["host","x"]]',
        '[["authorization","%s"], ["host","x"]]',
        "[(b'Authorization', b'Bearer %s'), (b'Host', b'x')]",
        "{b'Authorization': b'Bearer %s', b'Host': b'x'}",
        '{"name": "authorization", "value": "Bearer %s"}, {"name": "host", "value": "x"}',
        '{"name": "Authorization", "value": "%s"}',
        '{"apiKey": "%s", "model": "m"}',
        "apiKey: '%s'",
        "{'xApiKey': '%s'}",
        '{"Authorization": "%s", "x": 1}',
        '{"Authorization": "Token %s", "x": 1}',
        r"{\"Authorization\": \"%s\", \"x\": 1}",
        "Authorization: %s, and more",
        "authorization: token %s",
        "Proxy-Authorization: Basic %s",
        "X-Auth-Token: %s",
        '{"x-auth-token": "%s"}',
        "Error code: 401 - {'error': {'message': 'Incorrect API key provided: %s'}}",
    ],
)
@pytest.mark.parametrize("secret", [SECRET, "abcdefgh+.~-0123456789/=="])
def test_a_bearer_token_within_text_is_cut_out_of_it(text: str, secret: str) -> None:
    left = _after({"llm.invocation_parameters": text % secret})
    assert left["llm.invocation_parameters"].string_value == text % "[removed]"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Set-Cookie: session=%s; Path=/; HttpOnly\r\nDate: x", "Set-Cookie: [removed]; HttpOnly\r\nDate: x"),
        ("curl -H 'Cookie: session=%s; theme=dark' https://x", "curl -H 'Cookie: [removed]' https://x"),
        ('{"cookie": "session=%s", "x": 1}', '{"cookie": "[removed]", "x": 1}'),
        ("[(b'set-cookie', b'id=%s; Secure')]", "[(b'set-cookie', b'[removed]; Secure')]"),
        ('{"Authorization": "Digest a={%s}, b", "x": 1}', '{"Authorization": "[removed]", "x": 1}'),
        (
            "connect('postgresql+psycopg://agent:%s@db:5432/a')",
            "connect('postgresql+psycopg://agent:[removed]@db:5432/a')",
        ),
        ("git clone https://:%s@example.com/a.git", "git clone https://:[removed]@example.com/a.git"),
        ('Authorization: Digest username="u", response="%s"\r\nDate: x', "Authorization: Digest [removed]\r\nDate: x"),
        ("authorization: AWS4-HMAC-SHA256 Credential=a, Signature=%s", "authorization: AWS4-HMAC-SHA256 [removed]"),
        ('{"name": "Cookie", "value": "id=%s"}', '{"name": "Cookie", "value": "[removed]"}'),
    ],
)
@pytest.mark.parametrize("secret", [SECRET, "x", "a" * 100_000])
def test_a_whole_value_is_cut_out_of_a_text_whatever_it_is(text: str, left: str, secret: str) -> None:
    assert _after({"headers": text % secret})["headers"].string_value == left


@pytest.mark.parametrize(
    "header",
    [
        ["Authorization", "secret"],
        {"name": "x-api-key", "value": "secret"},
        {"value": "secret", "key": "Set-Cookie"},
    ],
)
def test_the_value_of_a_header_that_is_a_pair_is_replaced(header: Attribute) -> None:
    left = _after({"sent": {"headers": [header, ["host", "kept"]]}})["sent"]  # type: ignore[list-item]
    assert "secret" not in str(left)
    assert "[removed]" in str(left)
    assert "kept" in str(left)


@pytest.mark.parametrize("run", [".", "-proxy", "_x-api", "authorization", "\n"])
def test_endless_keys_take_no_time_and_hide_no_secret(run: str) -> None:
    key = run * (8 * 2**20 // len(run))
    attributes: dict[str, Attribute] = {f"{key}x": 1, f"{key}.set-cookie": SECRET, f"{key}-Proxy-Authorization": SECRET}
    began = time.process_time()
    left = _after(attributes)
    assert time.process_time() - began < 1.5
    assert set(left) == {f"{key}x"}


@pytest.mark.parametrize(
    "run",
    [
        *(
            " ",
            "\\",
            '"',
            "authorization:",
            "authorization: ",
            "authorization: digest ",
            "://",
            "://a:",
            "bearer ",
            "api_key",
            "api_key=",
            "api_key=a",
            "x-api-key",
        ),
        *(
            "api key provided",
            "api key provided:",
            "sk-",
            "sk-a",
            " sk-",
            "-sk-a",
            "a",
            "_",
            "a-",
            "x-api-key='",
            "api-key,",
            "cookie",
            "cookie:",
            "cookie=a",
            "cookie:a;",
            "a=b;",
            ";a",
            ",'value'",
            "b'",
            "apikey=",
            'authorization,"value',
            'authorization,"value":"',
        ),
    ],
)
@pytest.mark.parametrize(
    "head",
    [
        "authorization",
        "authorization:",
        "authorization: bearer",
        "api_key=",
        "sk-",
        "x-api-key:",
        "cookie:",
        'authorization","value":"',
    ],
)
def test_a_long_text_of_anything_is_searched_in_no_time(head: str, run: str) -> None:
    text = head + run * (2**18 // len(run))
    began = time.process_time()
    _after({"text": text + "x"})
    assert time.process_time() - began < 0.5  # at 1 ns a step, a search of quadratic time takes 34 s


def test_secret_attributes_are_removed_in_a_time_that_grows_with_their_number() -> None:
    n_attributes = 600_000
    message = trace_request(span(1, 1))
    attributes = message.resource_spans[0].scope_spans[0].spans[0].attributes
    for number in range(n_attributes):
        attributes.add(key="cookie" if number % 2 else f"k{number}").value.int_value = 1
    began = time.process_time()
    redacted = Redaction().apply(message, message.SerializeToString())
    assert time.process_time() - began < 5
    assert redacted.n_secrets == n_attributes // 2
    left = type(message).FromString(redacted.body).resource_spans[0].scope_spans[0].spans[0].attributes
    assert [pair.key for pair in left] == [f"k{number}" for number in range(0, n_attributes, 2)]


def test_a_bearer_token_in_a_status_message_or_a_name_is_cut_out_of_it() -> None:
    text = "GET failed with Authorization: Bearer %s"
    message = trace_request(span(1, 1, name=text % SECRET, events=[event(text % SECRET, {})]))
    stored = message.resource_spans[0].scope_spans[0].spans[0]
    stored.status.message = text % SECRET
    redacted = Redaction().apply(message, message.SerializeToString())
    assert redacted.n_secrets == 3
    [left] = type(message).FromString(redacted.body).resource_spans[0].scope_spans[0].spans
    assert {left.name, left.status.message, left.events[0].name} == {text % "[removed]"}
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.add().event_name = text % SECRET
    assert SECRET.encode() not in Redaction().apply(logs, logs.SerializeToString()).body


@pytest.mark.parametrize(
    "key", ["sk-proj-0123456789abcdef", "sk-abcdefghij0123456789ABCDEF", "sk-ant-api03-aAbBcCdDeEfF_0"]
)
def test_a_vendors_key_is_cut_out_of_a_text_wherever_it_is(key: str) -> None:
    assert _after({"error.message": f"the key {key}, which is wrong"})["error.message"].string_value == (
        "the key [removed], which is wrong"
    )


@pytest.mark.parametrize(
    "text",
    [
        "An API key: set OPENAI_API_KEY, or pass api_key=os.environ['OPENAI_API_KEY'], or api_key=settings.key_of_service.",
        "api_key: str | None = None, api-key, x_api_key = header(default_value_of_the_key)",
        "risk-taking-at-scale-2024-with-care, task-00000000000000000001, sk-learn-is-no-key-but-a-library",
        "Incorrect API key provided.",
        "Ask for the authorization of the request, with authorization: required; authorization, cookies and cookie: none.",
        '["authorization", "cookie", "accept"], {"authorization": {"type": "string"}}, cookie = jar.get(name=x)',
        "the authorization=self.authorization, cookie == other, set_cookie(key=1), the cookie, name = first",
        "sk-proj- and sk-ant- begin keys",
        "https://example.com:8080/@a, http://a@b.com, ssh://git@host:22/x, write to a@b.com: it is at https://x.org",
        "the x-auth-token header, an auth token: none",
        '{"x-api-key": {"type": "string"}, "X-API-Key": ["header"]}',
    ],
)
def test_text_that_only_speaks_of_keys_stays_as_it_is(text: str) -> None:
    assert _after({"gen_ai.input.messages": text})["gen_ai.input.messages"].string_value == text


def test_text_that_only_speaks_of_authorization_stays_as_it_is() -> None:
    text = "The authorization: a bearer of bad news; cookies and api-key\x12 are words."
    message = trace_request(span(1, 1, {"gen_ai.input.messages": text, "x.authorization.kind": "oauth"}))
    body = message.SerializeToString()
    assert Redaction().apply(message, body).body == body


@pytest.mark.parametrize("place", range(-30, 30))
def test_a_secret_is_found_wherever_it_lies_in_a_large_request(place: int) -> None:
    padding: dict[str, Attribute] = {"a": "x" * (2**20 + place)}
    assert set(_after({**padding, "X-API-KEY": SECRET})) == {"a"}


def test_nested_secrets_are_found_at_any_depth() -> None:
    left = _after({"request": {"headers": {"authorization": SECRET, "accept": "*"}, "list": [{"cookie": SECRET}]}})
    assert SECRET not in str(left)
    assert left["request"].kvlist_value.values[0].value.kvlist_value.values[0].key == "accept"


def test_a_star_alone_blocks_every_key() -> None:
    message = ExportTraceServiceRequest()
    span = message.resource_spans.add().scope_spans.add().spans.add()
    span.attributes.add(key="anything").value.int_value = 1
    redacted = Redaction(["*"]).apply(message, message.SerializeToString())
    assert redacted.n_blocked == 1


def test_requests_are_searched_for_secrets_in_several_threads_at_once() -> None:
    """Hyperscan's scratch space must not be shared."""
    clean, secret = ExportTraceServiceRequest(), ExportTraceServiceRequest()
    for message, text in ((clean, "x" * 200_000), (secret, "x" * 200_000 + " Authorization: Bearer abc")):
        span = message.resource_spans.add().scope_spans.add().spans.add()
        span.attributes.add(key="text").value.string_value = text
    bodies = [clean.SerializeToString(), secret.SerializeToString()]
    redaction = Redaction()

    def count(number: int) -> int:
        body = bodies[number % 2]
        return redaction.apply(ExportTraceServiceRequest.FromString(body), body).n_secrets

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(count, range(200))) == [0, 1] * 100


def test_blocked_keys_are_removed_and_named_exact_ones_and_prefixes() -> None:
    attributes = {
        "gen_ai.input.messages": "a",
        "gen_ai.input.messages.count": 1,
        "customer.name": "b",
        "customer.id": 2,
        "c": 3,
    }
    left = _after(attributes, "gen_ai.input.messages", "customer.*")
    assert set(left) == {"gen_ai.input.messages.count", "c", keys.REDACTED}
    named = [item.string_value for item in left[keys.REDACTED].array_value.values]
    assert sorted(named) == ["customer.id", "customer.name", "gen_ai.input.messages"]


def test_events_links_resources_scopes_and_log_bodies_are_gone_through() -> None:
    message = trace_request(span(1, 1, events=[event("e", {"pin": SECRET, "kept": 1})]), resource={"pin": SECRET})
    scope_spans = message.resource_spans[0].scope_spans[0]
    scope_spans.spans[0].links.add().attributes.extend(key_values({"pin": SECRET}))
    scope_spans.scope.attributes.extend(key_values({"pin": SECRET}))
    redacted = Redaction(["pin"]).apply(message, message.SerializeToString())
    assert SECRET.encode() not in redacted.body
    assert (redacted.n_blocked, redacted.n_secrets) == (4, 0)
    left = type(message).FromString(redacted.body).resource_spans[0]
    for owner in (left.resource, left.scope_spans[0].scope, left.scope_spans[0].spans[0]):
        assert [pair.key for pair in owner.attributes] == [keys.REDACTED]
    logs = ExportLogsServiceRequest()
    record = logs.resource_logs.add().scope_logs.add().log_records.add()
    record.body.CopyFrom(any_value({"pin": SECRET, "said": {"cookie": SECRET}}))
    redacted = Redaction(["pin"]).apply(logs, logs.SerializeToString())
    assert SECRET.encode() not in redacted.body
    assert (redacted.n_blocked, redacted.n_secrets) == (1, 1)


def test_no_secret_reaches_the_disk_over_any_listener(tmp_path: Path) -> None:
    store = tmp_path / "s.duckdb"
    attributes: dict[str, Attribute] = {"gen_ai.headers": SECRET, "user.name": SECRET, "n": 1}
    logs = ExportLogsServiceRequest()
    record = logs.resource_logs.add().scope_logs.add().log_records.add()
    record.attributes.extend(key_values(attributes))
    in_json = {
        "traceId": "0" * 31 + "1", "spanId": "0" * 15 + "3",
        "attributes": [{"key": "user.name", "value": {"stringValue": SECRET}}],
    }  # fmt: skip
    with running(store, blocked_keys="user.name, other.*", load_interval_s=30, http=ANY_PORT) as collector:
        export(collector.address, span(1, 1, attributes))
        send(collector.address, LOGS, logs.SerializeToString())
        request(collector.address, "/v1/traces", trace_request(span(1, 2, attributes)).SerializeToString())
        body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [in_json]}]}]}).encode()
        request(collector.address, "/v1/traces", body, content_type="application/json")
        in_journal = [path for path in tmp_path.rglob("*.journal") if path.is_file()]
        assert in_journal
        assert _holding(tmp_path, b"user.name")  # the redaction mark names the key: the search below works
        assert not _holding(tmp_path, SECRET.encode())
        rows = [json.loads(row["attributes"]) for row in read(collector.address, "spans")]
        assert rows == [{"n": 1, keys.REDACTED: ["user.name"]}] * 2 + [{keys.REDACTED: ["user.name"]}]
        [log] = read(collector.address, "logs")
        assert json.loads(log["attributes"]) == {"n": 1, keys.REDACTED: ["user.name"]}
        page = request(collector.address, "/metrics", method="GET").body.decode()
        assert 'redacted_values_total{kind="blocked"} 4.0' in page
        assert 'redacted_values_total{kind="secret"} 3.0' in page
    assert not _holding(tmp_path, SECRET.encode())


def _holding(folder: Path, needle: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and needle in path.read_bytes()]

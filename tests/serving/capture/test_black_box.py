"""Agents without OpenTelemetry, in any language, that accept only a base URL or an API key."""

import dataclasses
import json
import os
import secrets
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.serving.support.servers import Models, Stack
from tests.support.otlp.recorder import OtlpRecorder
from tests.support.policy_server.process import policy_server
from trainspan_rollouts import RunSettings, run_rollouts
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, TraceParent
from trainspan_schemas.telemetry.signing import KEY_FILE, signing_key

pytestmark = pytest.mark.ci

BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "calc 7*5"}], "max_tokens": 8})

NODE = """
import OpenAI from "openai";

const client = new OpenAI();  // OPENAI_BASE_URL and OPENAI_API_KEY, nothing else
const messages = [{ role: "user", content: "calc 7*5" }];
const whole = await client.chat.completions.create({ model: "policy", messages, max_tokens: 8 });
const stream = await client.chat.completions.create({ model: "policy", messages, max_tokens: 8, stream: true });
let id;
for await (const chunk of stream) id = chunk.id;
console.log(JSON.stringify([whole.id, id]));
"""


@pytest.fixture
def parent() -> TraceParent:
    return TraceParent(secrets.token_hex(16), secrets.token_hex(8))


def bare_environment(**variables: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}


def curl(url: str, *arguments: str) -> str:
    command = ["curl", "-sS", "--fail", url, "-H", "Content-Type: application/json", "-d", BODY, *arguments]
    done = subprocess.run(command, env=bare_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["id"])


def test_curl_with_the_rollouts_url_or_its_key(base_policy: Stack, parent: TraceParent) -> None:
    url = base_policy.server.url
    ids = [
        curl(f"{url}/rollout/{parent}/v1/chat/completions"),
        curl(f"{url}/v1/chat/completions", "-H", f"Authorization: Bearer trainspan-{parent}"),
        curl(f"{url}/v1/messages", "-H", f"x-api-key: trainspan-{parent}"),
    ]
    spans = base_policy.sink.wait(3, lambda span: span.trace_id == parent.trace_id)
    spans.sort(key=lambda span: span.attributes[keys.CALL_INDEX])
    assert [span.attributes[keys.GEN_AI_RESPONSE_ID] for span in spans] == ids
    assert {span.parent_span_id for span in spans} == {parent.span_id}
    assert all(span.attributes[keys.CALL_DELIVERED] for span in spans)
    assert all(span.attributes[keys.USER_AGENT].startswith("curl/") for span in spans)
    assert not any(span.attributes[keys.CALL_SIGNED] for span in spans)


def test_an_identity_that_a_caller_made_up_is_stored_as_such(base_policy: Stack, parent: TraceParent) -> None:
    key = signing_key(str(base_policy.server.home / KEY_FILE))
    url = f"{base_policy.server.url}/rollout/{parent}.{parent.signature(key)}/v1/chat/completions"
    own, victim = Identity("own", "run", "t", 0, 1).signed(key), Identity("victim", "run", "t", 0, 1)
    curl(url)
    curl(url, "-H", f"baggage: {own.to_baggage()}")
    curl(url, "-H", f"baggage: {victim.to_baggage()}")
    curl(url, "-H", f"baggage: {dataclasses.replace(victim, signature=own.signature).to_baggage()}")
    spans = base_policy.sink.wait(4, lambda span: span.trace_id == parent.trace_id)
    stored = [(span.attributes.get(keys.ROLLOUT_ID), span.attributes[keys.CALL_SIGNED]) for span in spans]
    assert sorted(stored, key=str) == [("own", True), ("victim", False), ("victim", False), (None, True)]
    assert not any(own.signature in map(str, span.attributes.values()) for span in spans)


def test_a_command_that_takes_only_url_and_key_is_a_rollout_of_the_runner(
    base_policy: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    (tmp_path / "body.json").write_text(BODY)
    (tmp_path / "harness.sh").write_text(
        'for _ in 1 2; do curl -sS --fail "$OPENAI_BASE_URL/chat/completions" -H "Content-Type: application/json" '
        f'-H "Authorization: Bearer $OPENAI_API_KEY" -d @{tmp_path}/body.json; done\n'
    )
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "input": "x"}\n{"id": "b", "input": "y"}\n')
    (tmp_path / "counting_judge.py").write_text(
        "def judge(task, result):\n    return result.stdout_tail.count('chatcmpl-')\n"
    )
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "PATH")
    only = [f'{name}="${name}"' for name in names]
    with OtlpRecorder() as recorder:
        result = run_rollouts(
            RunSettings(
                tmp_path / "tasks.jsonl",
                ("sh", "-c", f"env -i {' '.join(only)} sh {tmp_path}/harness.sh"),
                "black-box",
                n=2,
                concurrency=2,
                judge=f"{tmp_path}/counting_judge.py:judge",
                policy_url=base_policy.server.url + "/v1",
                collector=recorder.endpoint,
                signing_key_file=str(base_policy.server.home / KEY_FILE),
            )
        )
        assert (result.status, result.mean_reward) == ({"ok": 4}, 2.0)
        rollouts = {span.trace_id: span for span in recorder.named("trainspan.rollout")}
    assert len(rollouts) == 4
    spans = base_policy.sink.wait(8, lambda span: span.trace_id in rollouts)
    for span in spans:
        assert span.parent_span_id == rollouts[span.trace_id].span_id
        assert span.attributes[keys.CALL_SIGNED]
    calls = sorted((span.trace_id, span.attributes[keys.CALL_INDEX]) for span in spans)
    assert calls == sorted((trace_id, index) for trace_id in rollouts for index in (0, 1))


@pytest.mark.slow
@pytest.mark.network
def test_a_node_agent_with_the_openai_package(base_policy: Stack, parent: TraceParent, tmp_path: Path) -> None:
    npm = shutil.which("npm")
    assert npm is not None, "this test needs Node.js"
    (tmp_path / "agent.mjs").write_text(NODE)
    subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--silent", "openai@7"],
        cwd=tmp_path, timeout=240, check=True, capture_output=True,
    )  # fmt: skip
    url, other = base_policy.server.url, TraceParent(secrets.token_hex(16), secrets.token_hex(8))
    for trace, variables in (
        (parent, {"OPENAI_BASE_URL": f"{url}/rollout/{parent}/v1", "OPENAI_API_KEY": "none"}),
        (other, {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": f"trainspan-{other}"}),
    ):
        done = subprocess.run(
            ["node", "agent.mjs"], cwd=tmp_path, env=bare_environment(**variables),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        spans = base_policy.sink.wait(2, lambda span, trace_id=trace.trace_id: span.trace_id == trace_id)
        spans.sort(key=lambda span: span.attributes[keys.CALL_INDEX])
        assert [span.attributes[keys.GEN_AI_RESPONSE_ID] for span in spans] == json.loads(done.stdout)
        assert all(span.attributes[keys.CALL_DELIVERED] for span in spans)


@pytest.mark.slow
def test_with_require_signature_only_a_runners_rollouts_are_answered(
    models: Models, parent: TraceParent, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    strict = {"TRAINSPAN_SERVING__REQUIRE_SIGNATURE": "true"}
    with policy_server(models.base, home, "--collector", "none", environment=strict) as server:
        signed = f"{parent}.{parent.signature(signing_key(str(home / KEY_FILE)))}"
        made_up = f"{parent}.{parent.signature(b'k' * 32)}"
        answers = [
            httpx.post(f"{server.url}{path}/v1/chat/completions", content=BODY, headers={"content-type": "application/json"}, timeout=60)
            for path in ("", f"/rollout/{parent}", f"/rollout/{made_up}", f"/rollout/{signed}")
        ]  # fmt: skip
    assert [answer.status_code for answer in answers] == [401, 401, 401, 200]

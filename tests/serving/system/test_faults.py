"""A server with planted faults, short timeouts, an API key and sampling by split; at the end it is killed."""

import json
import os
import secrets
import shutil
import signal
import threading
import time
import urllib.request
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.support.servers import Faulty, Models, Stack, publish_base
from tests.support.models.canary import greedy_ids, write_checkpoint_files
from tests.support.policy_server.process import RunningServer
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, TraceParent

KEY = {"Authorization": "Bearer sesame"}
LONG_PROMPT = [(13 * position) % 240 + 10 for position in range(300)]
MESSAGES = [{"role": "user", "content": "calc 7"}]


@pytest.mark.parametrize("fault", ["unpacked", "frozen", "forgotten reset"])
def test_the_canary_fails_for_tied_heads_not_repacked_frozen_weights_and_a_cache_not_cleared(
    faulty: Faulty, models: Models, fault: str
) -> None:
    server, _, checkpoints = faulty
    (checkpoints.parent / "fault").write_text(fault)
    status, answer = server.swap("policy-000001", 1)
    (checkpoints.parent / "fault").unlink()
    assert status == 409
    canary = answer["canary"]
    assert canary["status"] == "stale"
    if fault == "forgotten reset":
        assert canary["max_abs_diff"] <= canary["tolerance"]  # the weights are right
        assert canary["tensors_differing"] == 0
        assert canary["cached_tokens"] == 32  # one block
        assert "32 tokens of a prompt were still cached from earlier weights" in answer["error"]
    else:
        assert canary["max_abs_diff"] > 0.1
        assert canary["cached_tokens"] == 0
        assert canary["tensors_differing"] == (1 if fault == "unpacked" else _changed(models.base, models.folder(1)))
    assert server.policy()["version"] == 0
    body = {"model": "policy", "prompt": LONG_PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, reply, headers = server.post("/v1/completions", {**body, "return_token_ids": True}, KEY)
    assert (status, headers[keys.HEADER_POLICY_VERSION]) == (200, "0")
    assert reply["choices"][0]["token_ids"] == greedy_ids(models.base, LONG_PROMPT, 8)


def test_a_seeded_request_samples_the_same_if_its_prompt_is_prefilled_in_chunks(faulty: Faulty) -> None:
    server, _, _ = faulty
    prompt = LONG_PROMPT[::-1]
    body = {
        "model": "policy",
        "prompt": prompt,
        "max_tokens": 12,
        "seed": 11,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answers = [server.post("/v1/completions", body, KEY) for _ in range(2)]  # the second finds 288 tokens in the cache
    assert [status for status, _, _ in answers] == [200, 200]
    in_parts, at_once = (reply["choices"][0]["token_ids"] for _, reply, _ in answers)
    assert in_parts == at_once
    other = server.post("/v1/completions", {**body, "seed": 12}, KEY)[1]["choices"][0]["token_ids"]
    assert other != at_once


@pytest.mark.parametrize("fault", [None, "unpacked", "frozen"])
def test_an_update_too_small_for_the_scores_is_verified_by_the_kernels(
    faulty: Faulty, models: Models, fault: str | None
) -> None:
    server, _, checkpoints = faulty
    folder = checkpoints / "policy-000004"
    shutil.copytree(models.base, folder)
    own = _tensors(models.folder(1)).keys()  # the base also has a copy of its tied head
    file, tensors = folder / "model.safetensors", {n: t for n, t in _tensors(models.base).items() if n in own}
    generator = torch.Generator().manual_seed(0)
    save_file({n: t + 1e-8 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}, file)
    write_checkpoint_files(folder, 4, models.base)
    if fault:
        (checkpoints.parent / "fault").write_text(fault)
    status, answer = server.swap(folder.name, 4)
    (checkpoints.parent / "fault").unlink(missing_ok=True)
    canary = answer["canary"]
    assert canary["max_abs_change"] < canary["tolerance"]
    assert canary["max_abs_diff"] < canary["tolerance"]
    assert canary["tensors_unknown"] == 0
    differing = {None: 0, "unpacked": 1, "frozen": _changed(models.base, folder)}[fault]
    assert (canary["tensors_equal"], canary["tensors_differing"]) == (len(tensors) - differing, differing)
    assert (status, canary["status"]) == ((409, "stale") if fault else (200, "fresh"))
    if not fault:
        publish_base(models, checkpoints)  # it stays: the served weights are reloaded after faults
        assert server.swap("policy-000000", 0)[1]["canary"]["status"] == "fresh"
    shutil.rmtree(folder)


def _changed(parent: Path, folder: Path) -> int:
    """Returns the tensors that are not bit-identical."""
    before, after = _tensors(parent), _tensors(folder)
    return sum(not torch.equal(before[name], after[name]) for name in before.keys() & after.keys())


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def test_a_request_held_too_long_gets_503_and_may_be_sent_again(faulty: Faulty) -> None:
    server, sink, _ = faulty
    body = {"model": "policy", "prompt": [5] * 100, "max_tokens": 900, "ignore_eos": True, "n": 16}
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(server.post("/v1/completions", body, KEY)[0]))
    thread.start()
    while server.policy()["in_flight"] == 0:
        time.sleep(0.005)
    answers: list[tuple[int, str]] = []
    swap = threading.Thread(target=lambda: answers.append(_swap(server)))
    swap.start()
    while server.policy()["open"]:
        time.sleep(0.005)
    status, reply, headers = _chat(server, KEY)
    assert (status, headers["retry-after"]) == (503, "1")
    assert "held this request for 0.2 s because new weights are being loaded" in reply["error"]["message"]
    # The SDK retries by itself, and the gate is open by then.
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
    traced = {"traceparent": str(parent)}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="sesame", default_headers=traced) as client:
        assert client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=3).id  # type: ignore[arg-type]
    (span,) = sink.wait(1, lambda span: span.trace_id == parent.trace_id)
    assert (span.attributes[keys.CALL_INDEX], span.attributes[keys.CALL_DELIVERED]) == (0, True)
    swap.join(30)
    thread.join(60)
    assert answers == [(200, "")]
    assert statuses == [503]
    assert server.policy()["open"] is True


def test_an_engine_that_fails_during_a_generation_leaves_a_call_marked_as_failed(faulty: Faulty) -> None:
    server, sink, checkpoints = faulty
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
    traced = {**KEY, "traceparent": str(parent)}
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": 50, "ignore_eos": True}
    (checkpoints.parent / "fault").write_text("broken generation")
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        json.dumps({**body, "stream": True}).encode(),
        {**traced, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert "planted" in answer.read().decode()  # an error in a stream that started with 200
    status, reply, _ = server.post("/v1/chat/completions", body, traced)
    (checkpoints.parent / "fault").unlink()
    assert (status, reply["error"]["code"]) == (500, 500)
    spans = sink.wait(2, lambda span: span.trace_id == parent.trace_id)
    streamed, whole = sorted(spans, key=lambda span: span.attributes[keys.CALL_INDEX])
    assert [span.attributes[keys.CALL_DELIVERED] for span in (streamed, whole)] == [False, False]
    assert (streamed.status, streamed.attributes[keys.GEN_AI_FINISH_REASONS]) == (2, ["abort"])
    # Without streaming, the engine's first output is its last: the tokens exist, but the client got an error.
    assert (whole.status, whole.attributes[keys.GEN_AI_FINISH_REASONS]) == (0, ["length"])
    assert server.policy()["in_flight"] == 0
    assert _chat(server, traced)[0] == 200


def test_the_secret_in_url_or_key_serves_as_the_servers_own_key(faulty: Faulty) -> None:
    server, sink, _ = faulty
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
    attempts = [
        ("/v1/chat/completions", {"Authorization": f"Bearer trainspan-{parent}-sesame"}, 200),
        (f"/rollout/{parent}-sesame/v1/chat/completions", {}, 200),
        (f"/rollout/{parent}/v1/chat/completions", KEY, 200),
        ("/v1/chat/completions", {"Authorization": f"Bearer trainspan-{parent}-guess"}, 401),
        ("/v1/chat/completions", {"Authorization": f"Bearer trainspan-{parent}"}, 401),
        (f"/rollout/{parent}-guess/v1/chat/completions", {}, 401),
    ]
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": 3}
    assert [server.post(path, body, headers)[0] for path, headers, _ in attempts] == [want for *_, want in attempts]
    assert len(sink.wait(3, lambda span: span.trace_id == parent.trace_id)) == 3


def test_sampling_of_rollouts_is_set_by_their_split_and_of_other_requests_by_the_client(faulty: Faulty) -> None:
    server, sink, _ = faulty
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": 3, "temperature": 0, "top_p": 0.5, "top_k": 3}
    recorded = []
    for split in ("train", "val", None):
        parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
        baggage = {"baggage": Identity(secrets.token_hex(8), split=split).to_baggage()} if split else {}
        assert server.post("/v1/chat/completions", body, {**KEY, **baggage, "traceparent": str(parent)})[0] == 200
        (span,) = sink.wait(1, lambda span, id_=parent.trace_id: span.trace_id == id_)
        recorded.append(
            [span.attributes[key] for key in (keys.GEN_AI_TEMPERATURE, keys.GEN_AI_TOP_P, keys.GEN_AI_TOP_K)]
        )
    assert recorded == [
        [1.0, 1.0, 0],
        [0.5, 1.0, 0],
        [0.0, 1.0, 0],
    ]  # vLLM itself clears top_p and top_k if it decodes greedily


def test_while_the_collector_is_unreachable_requests_are_served_and_their_spans_arrive_later(
    models: Models, stack: Stack
) -> None:
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
    before = stack.server.policy()
    stack.stop_collector()
    for _ in range(3):
        body = {"model": "policy", "messages": MESSAGES, "max_tokens": 3}
        assert stack.server.post("/v1/chat/completions", body, {"traceparent": str(parent)})[0] == 200
    state = stack.server.policy()
    assert state["calls_captured"] == before["calls_captured"] + 3
    assert state["calls_exported"] <= before["calls_captured"]
    while stack.server.policy()["calls_spooled"] < 3:
        time.sleep(0.05)
    stack.start_collector()
    spans = stack.sink.wait(3, lambda span: span.trace_id == parent.trace_id)
    assert sorted(span.attributes[keys.CALL_INDEX] for span in spans) == [0, 1, 2]
    assert stack.server.policy()["calls_dropped"] == before["calls_dropped"]


@pytest.mark.ci
def test_after_a_crash_the_last_good_policy_is_served_again_and_call_numbers_continue(
    faulty: Faulty, models: Models
) -> None:
    server, sink, checkpoints = faulty
    status, answer = server.swap("policy-000002", 2)
    assert (status, answer["canary"]["status"]) == (200, "absent")
    identity = Identity(secrets.token_hex(8))
    for _ in range(2):
        assert _chat(server, {**KEY, "baggage": identity.to_baggage()})[0] == 200
    sink.wait(2, lambda span: span.attributes.get(keys.ROLLOUT_ID) == identity.rollout_id)
    (child,) = _children(server.process.pid)
    os.kill(child, signal.SIGKILL)
    assert server.process.stdout is not None
    assert '"version": 2' in server.process.stdout.readline()
    state = server.policy()
    assert (state["version"], state["checkpoint"]) == (2, "policy-000002")
    write_checkpoint_files(checkpoints / "policy-000002", 2, models.base)
    assert _chat(server, {**KEY, "baggage": identity.to_baggage()})[2][keys.HEADER_POLICY_VERSION] == "2"
    spans = sink.wait(3, lambda span: span.attributes.get(keys.ROLLOUT_ID) == identity.rollout_id)
    assert sorted(span.attributes[keys.CALL_INDEX] for span in spans) == [0, 1, 2]


def test_if_the_supervisor_is_killed_the_server_ends_too(faulty: Faulty) -> None:
    server, _, _ = faulty
    family = _children(server.process.pid)
    family += [grandchild for child in family for grandchild in _children(child)]
    assert len(family) >= 2  # the server and its engine
    server.process.kill()
    server.process.wait(10)
    deadline = time.monotonic() + 10
    while any(_is_running(pid) for pid in family):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _chat(server: RunningServer, headers: dict[str, str]) -> tuple[int, dict[str, object], dict[str, str]]:
    return server.post("/v1/chat/completions", {"model": "policy", "messages": MESSAGES, "max_tokens": 3}, headers)


def _swap(server: RunningServer) -> tuple[int, str]:
    status, answer = server.swap("policy-000002", 2)
    return status, answer.get("error", "")


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]

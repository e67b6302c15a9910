"""Swaps of the weights of a running server."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.serving.support.servers import Models, Stack, publish_base
from tests.serving.support.traffic import LONG_PROMPT, check_calls, greedy, load, metric, wait_for_answers
from tests.support.models.adapters import adapter_logprobs, make_adapter
from tests.support.models.canary import greedy_ids, logprobs_of
from trainspan_schemas.artifacts.checkpoint import CANARY_FILE, META_FILE, Canary, CheckpointMeta
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs

pytestmark = pytest.mark.usefixtures("base_policy")


def test_after_a_swap_the_new_weights_answer_and_everything_says_so(stack: Stack, models: Models) -> None:
    assert greedy(stack.server) == (greedy_ids(models.base, LONG_PROMPT, 12), "0")
    status, answer = stack.server.swap("policy-000001", 1)
    assert status == 200, answer
    assert (answer["version"], answer["checkpoint"]) == (1, "policy-000001")
    assert set(answer["seconds"]) == {"validate", "drain", "reload", "canary", "total"}
    canary = answer["canary"]
    assert canary["status"] == "fresh"
    assert canary["max_abs_diff"] <= canary["tolerance"] == 1e-4
    assert canary["max_abs_change"] > 0.1
    assert "policy=policy swapped version=1 canary=fresh" in stack.server.log.read_text()

    # The prompt was cached with the old weights: if the cache were not cleared, this would differ.
    assert greedy(stack.server) == (greedy_ids(models.folder(1), LONG_PROMPT, 12), "1")
    state = stack.server.policy()
    assert (state["version"], state["checkpoint"], state["open"]) == (1, "policy-000001", True)
    assert state["canary"] == canary
    spans = stack.sink.wait(1, lambda span: span.attributes[keys.POLICY_VERSION] == 1 and not _internal(span))
    assert decode_ids(spans[-1].attributes[keys.COMPLETION_TOKEN_IDS]) == greedy_ids(models.folder(1), LONG_PROMPT, 12)


def test_the_metrics_add_up_the_swaps_and_their_seconds(stack: Stack) -> None:
    names = ("trainspan_policy_swap_seconds_total", 'trainspan_policy_swaps_total{outcome="fresh"}')
    seconds, fresh = (metric(stack.server, name) for name in names)
    for version in (1, 2):
        status, answer = stack.server.swap(f"policy-{version:06d}", version)
        assert status == 200, answer
        seconds, fresh = seconds + answer["seconds"]["total"], fresh + 1
        assert [metric(stack.server, name) for name in names] == [pytest.approx(seconds, abs=0.001), fresh]


def test_the_canary_is_marked_internal(stack: Stack) -> None:
    start_ns = time.time_ns()
    assert stack.server.swap("policy-000001", 1)[0] == 200
    # One prompt before and one after the load, for the prefix cache, and the three scored ones.
    spans = stack.sink.wait(5, lambda span: span.start_ns > start_ns)
    assert [(_internal(span), keys.ROLLOUT_ID in span.attributes) for span in spans] == [(True, False)] * 5


def _republish_base(stack: Stack, models: Models) -> Path:
    """Swaps in the checkpoint of version 0, whose folder adapters then name as their base."""
    publish_base(models, models.checkpoints)
    status, answer = stack.server.swap("policy-000000", 0)
    assert status == 200, answer
    return models.checkpoints / "policy-000000"


def test_an_adapter_is_merged_into_the_weights_and_full_weights_replace_it(stack: Stack, models: Models) -> None:
    base, folder = _republish_base(stack, models), models.checkpoints / "policy-000021"
    tuned = make_adapter(base, folder, 21, seed=3)
    status, answer = stack.server.swap(folder.name, 21)
    assert status == 200, answer
    assert answer["canary"]["status"] == "fresh"
    names = load_file(base / "model.safetensors").keys()
    n_buffers = sum(name.endswith("inv_freq") for name in names)
    figures = [answer["canary"][f"tensors_{name}"] for name in ("equal", "differing", "unknown")]
    assert figures == [len(names) - n_buffers, 0, n_buffers]
    state = stack.server.policy()
    assert (state["version"], state["kind"], state["checkpoint"], state["base"]) == (
        21,
        "lora",
        folder.name,
        "policy-000000",
    )

    start_ns = time.time_ns()
    ids, version = greedy(stack.server)
    assert version == "21"
    (span,) = stack.sink.wait(1, lambda span: span.start_ns > start_ns and not _internal(span))
    assert (span.attributes[keys.POLICY_VERSION], decode_ids(span.attributes[keys.COMPLETION_TOKEN_IDS])) == (21, ids)
    sampled = decode_logprobs(span.attributes[keys.COMPLETION_LOGPROBS])
    assert sampled == pytest.approx(adapter_logprobs(tuned, LONG_PROMPT, ids), abs=1e-4)

    assert stack.server.swap("policy-000001", 1)[0] == 200
    assert greedy(stack.server) == (greedy_ids(models.folder(1), LONG_PROMPT, 12), "1")
    status, answer = stack.server.swap(folder.name, 21)
    assert (status, "was trained on" in answer["error"]) == (400, True)
    shutil.rmtree(folder)


def test_a_merged_adapter_that_the_trainer_scored_differently_restores_the_old_weights(
    stack: Stack, models: Models
) -> None:
    folder = models.checkpoints / "policy-000022"
    make_adapter(_republish_base(stack, models), folder, 22, seed=4)
    canary = Canary.read(folder)
    canary.prompts[0].logprobs_new[0] += 0.01
    canary.write(folder)
    status, answer = stack.server.swap(folder.name, 22)
    assert (status, answer["canary"]["status"]) == (409, "stale")
    assert greedy(stack.server) == (greedy_ids(models.base, LONG_PROMPT, 12), "0")
    assert stack.server.policy()["kind"] == "full"
    shutil.rmtree(folder)


def test_swaps_under_load_fail_no_request_and_mix_no_call(stack: Stack, models: Models) -> None:
    served = []
    with load(stack.server, prompt_tokens=20) as answers:
        for version in (1, 2, 1, 2):
            wait_for_answers(answers, 10)
            status, answer = stack.server.swap(f"policy-{version:06d}", version)
            served.append((status, answer["canary"]["status"]))
        wait_for_answers(answers, 10)
    assert served == [(200, "fresh")] * 4
    assert {version for _, version in answers.values()} == {"0", "1", "2"}
    check_calls(stack.sink, answers, lambda version, *tokens: logprobs_of(models.folder(version), *tokens), 40)


def test_a_swap_waits_for_a_running_stream(stack: Stack) -> None:
    body = {"model": "policy", "prompt": LONG_PROMPT, "max_tokens": 400, "ignore_eos": True}
    answers: list[tuple[int, Any, dict[str, str]]] = []
    thread = threading.Thread(target=lambda: answers.append(stack.server.post("/v1/completions", body)))
    thread.start()
    while stack.server.policy()["in_flight"] == 0:
        time.sleep(0.005)
    status, answer = stack.server.swap("policy-000002", 2)
    thread.join(30)
    assert status == 200
    assert answer["seconds"]["drain"] > 0.05
    ((status, reply, headers),) = answers
    assert (status, headers[keys.HEADER_POLICY_VERSION], reply["usage"]["completion_tokens"]) == (200, "0", 400)


def test_weights_with_barely_changed_scores_are_verified_by_the_kernels(stack: Stack, models: Models) -> None:
    folder = _copy(models, 1, 11)
    canary = Canary.read(folder)
    for prompt in canary.prompts:
        prompt.logprobs_parent[:] = [value + 5e-5 for value in prompt.logprobs_new]
    canary.write(folder)
    status, answer = stack.server.swap(folder.name, 11)
    assert (status, answer["canary"]["status"]) == (200, "fresh")
    shutil.rmtree(folder)


@pytest.mark.parametrize("fault", ["not what the trainer scored", "not a number"])
def test_a_canary_that_disagrees_restores_the_old_weights(stack: Stack, models: Models, fault: str) -> None:
    folder = _copy(models, 1, 12)
    canary = Canary.read(folder)
    canary.prompts[1].logprobs_new[5] += 0.01 if fault != "not a number" else float("nan")
    canary.write(folder)
    status, answer = stack.server.swap(folder.name, 12)
    assert status == 409
    assert answer["canary"]["status"] == "stale"
    assert "version 0 stays in service" in answer["error"]
    assert greedy(stack.server) == (greedy_ids(models.base, LONG_PROMPT, 12), "0")
    state = stack.server.policy()
    assert (state["version"], state["open"], state["canary"]["status"]) == (0, True, "stale")
    shutil.rmtree(folder)


def _spoil_missing_tensor(folder: Path) -> None:
    _rewrite_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))


def _spoil_shape(folder: Path) -> None:
    _rewrite_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:-1]}))


def _spoil_extra_tensor(folder: Path) -> None:
    _rewrite_tensors(folder, lambda tensors: tensors.update({"lm_head.bias": tensors["model.norm.weight"]}))


def _spoil_half_written(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _spoil_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _spoil_vocabulary(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|other|>"))


def _spoil_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))


def _spoil_kind(folder: Path) -> None:
    meta = json.loads((folder / META_FILE).read_text())
    (folder / META_FILE).write_text(json.dumps({**meta, "kind": "lora"}))


def _spoil_meta(folder: Path) -> None:
    (folder / META_FILE).unlink()


def _spoil_hash(folder: Path) -> None:
    meta = json.loads((folder / META_FILE).read_text())
    (folder / META_FILE).write_text(json.dumps({**meta, "weights_sha256": "0" * 64}))


def _spoil_canary(folder: Path) -> None:
    (folder / CANARY_FILE).write_text('{"dtype": "float32"}')


def _spoil_link(folder: Path) -> None:
    target = folder / "model.safetensors"
    target.rename(folder / "elsewhere")
    target.symlink_to(folder / "elsewhere")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_spoil_missing_tensor, "lacks 1 tensors, first 'model.norm.weight'"),
        (_spoil_shape, "tensor 'model.norm.weight' has shape [63], the served model's has [64]"),
        (_spoil_extra_tensor, "has 1 tensors that the served model lacks, first 'lm_head.bias'"),
        (_spoil_half_written, "is not a complete safetensors file"),
        (_spoil_tokenizer, "has no tokenizer"),
        (_spoil_vocabulary, "a different vocabulary"),
        (_spoil_config, "config rms_norm_eps is 0.5, served is 1e-06"),
        (_spoil_kind, "has no adapter_config.json"),
        (_spoil_meta, "has no trainspan.json"),
        (_spoil_hash, "its safetensors files differ from what the trainer wrote"),
        (_spoil_canary, "canary.json is malformed"),
        (_spoil_link, "has a symbolic link, 'model.safetensors'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_untouched(
    stack: Stack, models: Models, broken: Path, spoil: Any, reason: str
) -> None:
    spoil(broken)
    status, answer = stack.server.swap(broken.name, 13)
    is_verdict = spoil is not _spoil_hash  # other bytes than the trainer wrote say nothing of the trainer's checkpoint
    assert (status, answer["reason"]) == ((400, "unfit") if is_verdict else (503, "copy_failed"))
    assert reason in answer["error"]
    assert "\n" not in answer["error"]
    assert greedy(stack.server, 4) == (greedy_ids(models.base, LONG_PROMPT, 4), "0")


@pytest.mark.parametrize(
    ("name", "version", "status", "reason"),
    [
        ("../base", 1, 400, "is not a checkpoint name"),
        ("..", 1, 400, "is not a checkpoint name"),
        ("/etc", 1, 400, "is not a checkpoint name"),
        ("policy-999999", 1, 404, "no checkpoint 'policy-999999'"),
        ("policy-000001", 2, 400, "holds version 1, not 2"),
        ("policy-000001", -1, 400, "the body must be"),
    ],
)
def test_a_name_leads_nowhere_but_into_the_checkpoints(
    stack: Stack, name: str, version: int, status: int, reason: str
) -> None:
    code, answer = stack.server.swap(name, version)
    assert (code, reason in answer["error"]) == (status, True), answer


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": ""}, 401),
        ({"Host": "evil.example"}, 400),
        ({"Host": "x@127.0.0.1"}, 400),
        ({"Host": r"evil.example\@127.0.0.1:8000"}, 400),
        ({"Content-Type": "text/plain"}, 400),
    ],
)
def test_a_swap_from_a_stranger_is_refused(stack: Stack, headers: dict[str, str], status: int) -> None:
    code, answer = stack.server.swap("policy-000001", 1, **headers)
    assert code == status
    assert isinstance(answer["error"], str)
    assert stack.server.policy()["version"] == 0


@pytest.fixture
def broken(models: Models) -> Iterator[Path]:
    folder = _copy(models, 1, 13)
    yield folder
    shutil.rmtree(folder)


def _copy(models: Models, source: int, version: int) -> Path:
    folder = models.folder(version)
    shutil.copytree(models.folder(source), folder)
    CheckpointMeta("full", version, "base", str(models.base), None).write(folder)
    return folder


def _rewrite_tensors(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _internal(span: Any) -> bool:
    return bool(span.attributes.get(keys.CALL_INTERNAL))

"""A vLLM started by hand with our `--middleware`, from a Hugging Face id: capture, and swaps of LoRA adapters."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.support.servers import HUB_ID, Plain
from tests.serving.support.traffic import LONG_PROMPT, check_calls, load, wait_for_answers
from tests.support.models.canary import greedy_ids
from trainspan_schemas.artifacts.checkpoint import META_FILE, Canary, CheckpointMeta
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs


def test_calls_are_captured_and_the_model_is_version_0(plain: Plain) -> None:
    state = plain.server.policy()
    assert (state["version"], state["kind"], state["model"]) == (0, "full", "policy")
    body = {"model": "policy", "messages": [{"role": "user", "content": "calc"}], "max_tokens": 12}
    status, reply, headers = plain.server.post("/v1/chat/completions", body)
    assert (status, headers[keys.HEADER_POLICY_VERSION]) == (200, "0")
    (span,) = plain.sink.wait(1, lambda span: span.attributes.get(keys.GEN_AI_RESPONSE_ID) == reply["id"])
    prompt, completion = (
        decode_ids(span.attributes[key]) for key in (keys.PROMPT_TOKEN_IDS, keys.COMPLETION_TOKEN_IDS)
    )
    assert decode_logprobs(span.attributes[keys.COMPLETION_LOGPROBS]) == pytest.approx(
        plain.logprobs(0, prompt, completion), abs=1e-4
    )


def test_an_adapter_is_swapped_in_and_its_prefixes_are_its_own(plain: Plain) -> None:
    assert plain.greedy()[0] == greedy_ids(plain.base, LONG_PROMPT, 8) or plain.server.policy()["version"] != 0
    for version in (1, 2, 1):
        status, answer = plain.swap(version)
        assert (status, answer["canary"]["status"]) == (200, "fresh"), answer
        assert answer["canary"]["max_abs_diff"] <= 1e-4
        assert answer["canary"]["max_abs_change"] > 0.1
        assert set(answer["seconds"]) == {"validate", "drain", "reload", "canary", "total"}
        assert answer["seconds"]["drain"] < 0.5  # nothing to wait for
        assert plain.greedy() == (plain.greedy_by_peft(version), str(version))
        state = plain.server.policy()
        assert (state["version"], state["kind"], state["checkpoint"]) == (version, "lora", f"policy-{version:06d}")


def test_swaps_of_adapters_under_load_fail_no_request_hold_none_and_mix_no_call(plain: Plain) -> None:
    assert plain.swap(2)[0] == 200
    served = []
    with load(plain.server, prompt_tokens=140) as answers:
        for version in (1, 2, 1):
            wait_for_answers(answers, 8)
            status, answer = plain.swap(version)
            served.append((status, answer["canary"]["status"]))
        wait_for_answers(answers, 8)
    assert served == [(200, "fresh")] * 3
    assert {version for _, version in answers.values()} == {"1", "2"}
    check_calls(plain.sink, answers, plain.logprobs, 20)


def test_a_request_in_flight_keeps_the_adapter_that_it_started_with(plain: Plain) -> None:
    assert plain.swap(1)[0] == 200
    body = {"model": "policy", "prompt": LONG_PROMPT, "max_tokens": 400, "ignore_eos": True}
    answers: list[tuple[int, Any, dict[str, str]]] = []
    thread = threading.Thread(target=lambda: answers.append(plain.server.post("/v1/completions", body)))
    thread.start()
    while plain.server.policy()["in_flight"] == 0:
        time.sleep(0.005)
    assert plain.swap(2)[0] == 200
    assert not answers  # the swap did not wait for it
    assert plain.greedy()[1] == "2"
    thread.join(60)
    ((status, reply, headers),) = answers
    assert (status, headers[keys.HEADER_POLICY_VERSION]) == (200, "1")
    (span,) = plain.sink.wait(1, lambda span: span.attributes.get(keys.GEN_AI_RESPONSE_ID) == reply["id"])
    completion = decode_ids(span.attributes[keys.COMPLETION_TOKEN_IDS])
    assert (span.attributes[keys.POLICY_VERSION], len(completion)) == (1, 400)
    told_logprobs = decode_logprobs(span.attributes[keys.COMPLETION_LOGPROBS])
    assert told_logprobs == pytest.approx(plain.logprobs(1, LONG_PROMPT, completion), abs=2e-4)


def _change_config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def _change_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return spoil


def _grow(tensors: dict[str, Any]) -> None:
    import torch

    for name, tensor in list(tensors.items()):
        tensors[name] = torch.cat([tensor] * 4, 0 if "lora_A" in name else 1).contiguous()


A_TENSOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _misname_base(folder: Path) -> None:
    CheckpointMeta("lora", 9, None, str(folder.parent), None).write(folder)


def _head(tensors: dict[str, Any]) -> None:
    import torch

    tensors["base_model.model.model.embed_tokens.lora_A.weight"] = torch.zeros(4, 64)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_change_config(use_dora=True), "does not serve adapters with use_dora = True"),
        (_change_config(modules_to_save=["lm_head"]), "does not serve adapters with modules_to_save = ['lm_head']"),
        (_change_config(peft_type="IA3"), "is an adapter of type 'IA3'"),
        (_change_tensors(_grow), "has rank 16, the server's limit is 8: start it with --max-lora-rank 16"),
        (_change_tensors(lambda tensors: tensors.pop(A_TENSOR)), "the two tensors of"),
        (
            _change_tensors(lambda tensors: tensors.update({A_TENSOR: tensors[A_TENSOR][:, :-1].contiguous()})),
            "q_proj.lora_A.weight' has shape [4, 63], its matrix [64, 64]",
        ),
        (
            _change_tensors(
                lambda tensors: tensors.update({"base_model.model.x.lora_A.weight": tensors[A_TENSOR].clone()})
            ),
            "matches no matrix of the served model",
        ),
        (_change_tensors(_head), "vLLM serves no adapter on 'model.embed_tokens'"),
        (_cut, "is not a complete safetensors file"),
        (_misname_base, "was trained on"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda folder: (folder / META_FILE).unlink(), "has no trainspan.json"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_while_the_old_one_serves(
    plain: Plain, copy: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    assert plain.server.policy()["version"] == 1 or plain.swap(1)[0] == 200
    spoil(copy)
    status, answer = plain.swap(9)
    assert (status, reason in answer["error"]) == (400, True), answer
    assert plain.server.policy()["version"] == 1


def test_the_canary_fails_for_an_adapter_that_is_not_the_trainers_and_the_old_one_stays(
    plain: Plain, copy: Path
) -> None:
    assert plain.swap(1)[0] == 200
    _change_config(lora_alpha=7)(copy)  # the trainer scored with 8
    status, answer = plain.swap(9)
    assert (status, answer["canary"]["status"]) == (409, "stale")
    assert "version 1 stays in service" in answer["error"]
    assert plain.greedy() == (plain.greedy_by_peft(1), "1")


def test_the_canary_fails_if_the_weights_are_still_the_earlier_ones(plain: Plain, copy: Path) -> None:
    assert plain.swap(1)[0] == 200
    Canary.read(plain.checkpoints / "policy-000002").write(copy)  # the trainer says that they changed
    status, answer = plain.swap(9)
    assert (status, answer["canary"]["status"]) == (409, "stale")
    assert plain.server.policy()["version"] == 1


def test_full_weights_need_our_worker_and_the_error_says_so(plain: Plain) -> None:
    status, answer = plain.swap(7)
    assert status == 400
    assert "--worker-extension-cls trainspan_serving.worker.PolicyWorker" in answer["error"]


@pytest.fixture
def copy(plain: Plain) -> Iterator[Path]:
    """Copies the first adapter as version 9."""
    folder = plain.checkpoints / "policy-000009"
    shutil.copytree(plain.checkpoints / "policy-000001", folder)
    CheckpointMeta("lora", 9, None, HUB_ID, None).write(folder)
    yield folder
    shutil.rmtree(folder)

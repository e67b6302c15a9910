"""Several policies on one server: who answers, swaps of one alone, hostile requests, and a restart with all of them."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.support.servers import Models
from tests.serving.support.traffic import LONG_PROMPT
from tests.support.models.adapters import make_adapter
from tests.support.otlp.sink import otlp_sink
from tests.support.policy_server.process import RunningServer, policy_server
from trainspan_schemas.artifacts.checkpoint import CANARY_FILE, write_latest
from trainspan_schemas.telemetry import keys

CONFIG = """
[model]
adapter = "lora"
lora_rank = 4
[policies.writer]
agents = "writer, editor"
[policies.rewriter]
"""


def ask(
    server: RunningServer, agent: str | None = None, model: str = "policy", n_tokens: int = 8
) -> tuple[list[int], str, str]:
    """Returns greedy tokens, policy and version in the response's headers, and the response's id."""
    body = {"model": model, "prompt": LONG_PROMPT, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"baggage": f"{keys.GEN_AI_AGENT_NAME}={agent}"} if agent else {}
    status, reply, answered = server.post("/v1/completions", {**body, "return_token_ids": True}, headers)
    assert status == 200, reply
    return (
        reply["choices"][0]["token_ids"],
        f"{answered[keys.HEADER_POLICY]} {answered[keys.HEADER_POLICY_VERSION]}",
        reply["id"],
    )


def swap(server: RunningServer, **body: object) -> tuple[int, dict[str, Any]]:
    token = (server.home / "token").read_text().strip()
    status, answer, _ = server.post("/trainspan/policy", body, {"Authorization": f"Bearer {token}"})
    return status, answer


def versions(server: RunningServer) -> dict[str, int]:
    return {name: state["version"] for name, state in server.policy()["policies"].items()}


def crash(server: RunningServer) -> None:
    """Kills vLLM and waits until its supervisor has restarted it."""
    (child,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    assert server.process.stdout is not None
    assert "ready" in server.process.stdout.readline()


def spoil_canary(folder: Path) -> None:
    canary = json.loads((folder / CANARY_FILE).read_text())
    canary["prompts"][0]["logprobs_new"][0] -= 1.0
    (folder / CANARY_FILE).write_text(json.dumps(canary))


@pytest.mark.ci
def test_policies_are_served_side_by_side_and_swapped_alone(models: Models, tmp_path: Path) -> None:
    checkpoints, config = tmp_path / "checkpoints", tmp_path / "trainspan.toml"
    config.write_text(CONFIG)
    for seed, (policy, version) in enumerate([("writer", 1), ("writer", 2), ("writer", 3), ("rewriter", 1)], 1):
        make_adapter(models.base, checkpoints / policy / f"policy-{version:06d}", version, seed=seed)
    spoil_canary(checkpoints / "writer/policy-000003")
    shutil.copytree(models.folder(1), checkpoints / "writer/policy-000004")
    shutil.copytree(checkpoints / "writer/policy-000001", checkpoints / "policy-000001")
    (checkpoints / "writer/policy-000005").symlink_to(checkpoints / "rewriter/policy-000001")
    write_latest(checkpoints / "rewriter", "policy-000001")
    with otlp_sink() as (sink, url):
        arguments = ("--collector", url, "--checkpoints", str(checkpoints), "--config", str(config))
        with policy_server(models.base, tmp_path / "home", *arguments) as server:
            # A policy begins with its newest checkpoint, or without one as the base.
            assert versions(server) == {"writer": 0, "rewriter": 1}
            base = ask(server)
            assert (base[1], ask(server, "writer")[:2]) == ("policy 0", (base[0], "writer 0"))
            rewriter = ask(server, "rewriter")
            assert (rewriter[1], rewriter[0] != base[0]) == ("rewriter 1", True)

            status, answer = swap(server, policy="writer", checkpoint="policy-000002", version=2)
            assert (status, answer["policy"], answer["canary"]["status"]) == (200, "writer", "fresh"), answer
            assert (answer["canary"]["tensors_differing"], answer["canary"]["tensors_unknown"]) == (0, 0)
            assert versions(server) == {"writer": 2, "rewriter": 1}
            writer = ask(server, "writer")
            assert writer[1] == "writer 2"
            assert len({tuple(ids) for ids, *_ in (base, rewriter, writer)}) == 3

            # The model's name comes before the agent's, and an agent of no policy is answered by the base.
            assert ask(server, "editor")[:2] == ask(server, None, "writer")[:2] == writer[:2]
            assert ask(server, "writer", "rewriter")[:2] == ask(server, "rewriter")[:2] == rewriter[:2]
            assert ask(server, "stranger")[:2] == base[:2]

            # A span names the policy that answered.
            named = {rewriter[2]: ("rewriter", 1), writer[2]: ("writer", 2), base[2]: ("policy", 0)}
            for span in sink.wait(3, lambda span: span.attributes.get(keys.GEN_AI_RESPONSE_ID) in named):
                told = (span.attributes[keys.POLICY_NAME], span.attributes[keys.POLICY_VERSION])
                assert told == named[str(span.attributes[keys.GEN_AI_RESPONSE_ID])]

            # What fails for one policy leaves both as they are.
            status, answer = swap(server, policy="writer", checkpoint="policy-000003", version=3)
            assert (status, answer["reason"], answer["canary"]["status"]) == (409, "canary_failed", "stale")
            states = server.policy()["policies"]
            assert (states["writer"]["version"], states["writer"]["canary"]["status"]) == (2, "stale")
            assert (states["rewriter"]["version"], states["rewriter"]["canary"]) == (1, None)
            for refused, expected in HOSTILE:
                status, answer = swap(server, **refused)
                assert (status, answer["reason"]) == expected, (refused, answer)
            assert versions(server) == {"writer": 2, "rewriter": 1}
            assert [ask(server, "writer")[:2], ask(server, "rewriter")[:2]] == [writer[:2], rewriter[:2]]

            # A name that a client invents is no policy: vLLM refuses it, and as an agent's name it is the base.
            for name in ("writer@2.3", "../writer", "writer ", "WRITER", "policy-000002"):
                body = {"model": name, "prompt": "x", "max_tokens": 1}
                assert server.post("/v1/completions", body)[0] == 404, name
                assert ask(server, name.replace(" ", "%20"))[:2] == base[:2]

            # Of two swaps at the same time one is refused as busy, and changes nothing.
            wanted = ({"policy": "writer", "version": 1}, {"policy": "rewriter", "version": 1})
            with ThreadPoolExecutor(2) as pool:
                answers = list(pool.map(lambda one: swap(server, checkpoint="policy-000001", **one), wanted))
            for (status, answer), one in zip(answers, wanted, strict=True):
                assert (status, answer.get("reason", "")) in ((200, ""), (503, "busy")), answer
                assert status == 503 or versions(server)[one["policy"]] == 1
            status, answer = swap(server, policy="writer", checkpoint="policy-000002", version=2)
            assert (status, versions(server)) == (200, {"writer": 2, "rewriter": 1})

            # In one batch each answer is of its own weights, also that of the base model.
            agents = ["stranger", "writer", "rewriter"]
            alone = [ask(server, agent, n_tokens=60)[:2] for agent in agents]
            with ThreadPoolExecutor(9) as pool:
                together = list(pool.map(lambda agent: ask(server, agent, n_tokens=60)[:2], 3 * agents))
            assert together == 3 * alone


REFUSED, UNFIT, MISSING = (400, "refused"), (400, "unfit"), (404, "not_found")
HOSTILE = [
    ({"checkpoint": "policy-000001", "version": 1}, REFUSED),
    ({"policy": "nobody", "checkpoint": "policy-000001", "version": 1}, REFUSED),
    ({"policy": "policy", "checkpoint": "policy-000001", "version": 1}, REFUSED),
    ({"policy": "../writer", "checkpoint": "policy-000001", "version": 1}, REFUSED),
    ({"policy": "..", "checkpoint": "policy-000001", "version": 1}, REFUSED),
    ({"policy": "", "checkpoint": "policy-000001", "version": 1}, REFUSED),
    ({"policy": ["writer"], "checkpoint": "policy-000001", "version": 1}, REFUSED),
    ({"policy": "writer", "checkpoint": "../rewriter/policy-000001", "version": 1}, UNFIT),
    ({"policy": "writer", "checkpoint": "..", "version": 1}, UNFIT),
    ({"policy": "writer", "checkpoint": "policy-000004", "version": 1}, UNFIT),  # full weights
    ({"policy": "writer", "checkpoint": "policy-000005", "version": 1}, UNFIT),  # a symbolic link
    ({"policy": "rewriter", "checkpoint": "policy-000002", "version": 2}, MISSING),  # the other policy's
]
"""Body of a swap → status and reason of the answer."""


def test_adapters_of_another_base_are_refused_at_the_start(models: Models, tmp_path: Path) -> None:
    checkpoints, config = tmp_path / "checkpoints", tmp_path / "trainspan.toml"
    config.write_text(CONFIG)
    make_adapter(models.base, checkpoints / "writer/policy-000001", 1, seed=1)
    write_latest(checkpoints / "writer", "policy-000001")
    arguments = ("--collector", "none", "--checkpoints", str(checkpoints), "--config", str(config))
    with (
        pytest.raises(AssertionError, match=r"was trained on"),
        policy_server(models.folder(2), tmp_path / "home", *arguments),
    ):
        pass


@pytest.mark.slow
def test_a_crash_brings_all_policies_back(models: Models, tmp_path: Path) -> None:
    checkpoints, config = tmp_path / "checkpoints", tmp_path / "trainspan.toml"
    config.write_text(CONFIG)
    make_adapter(models.base, checkpoints / "writer/policy-000002", 2, seed=2)
    make_adapter(models.base, checkpoints / "rewriter/policy-000001", 1, seed=4)
    write_latest(checkpoints / "rewriter", "policy-000001")
    arguments = ("--collector", "none", "--checkpoints", str(checkpoints), "--config", str(config))
    with policy_server(models.base, tmp_path / "home", *arguments) as server:
        base, rewriter = ask(server), ask(server, "rewriter")
        assert swap(server, policy="writer", checkpoint="policy-000002", version=2)[0] == 200
        writer = ask(server, "writer")
        crash(server)
        assert versions(server) == {"writer": 2, "rewriter": 1}
        assert [ask(server, "writer")[:2], ask(server, "rewriter")[:2]] == [writer[:2], rewriter[:2]]

        # One whose checkpoint is gone goes back to where it began, and the other stays.
        shutil.rmtree(checkpoints / "writer/policy-000002")
        crash(server)
        assert versions(server) == {"writer": 0, "rewriter": 1}
        assert (ask(server, "writer")[0], ask(server, "rewriter")[:2]) == (base[0], rewriter[:2])

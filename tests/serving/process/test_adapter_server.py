"""`trainspan serve ADAPTER`: a server that starts with an adapter, switches to full weights and back, and crashes."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.serving.support.servers import Models
from tests.support.models.adapters import make_adapter
from tests.support.models.canary import write_checkpoint_files
from tests.support.otlp.sink import otlp_sink
from tests.support.policy_server.process import RunningServer, policy_server
from trainspan_schemas.telemetry import keys

LONG_PROMPT = [(13 * position) % 240 + 10 for position in range(300)]


def greedy(server: RunningServer) -> tuple[list[int], str]:
    body = {"model": "policy", "prompt": LONG_PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, reply, headers = server.post("/v1/completions", {**body, "return_token_ids": True})
    assert status == 200, reply
    return reply["choices"][0]["token_ids"], headers[keys.HEADER_POLICY_VERSION]


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["true", "false"])
def test_adapters_and_full_weights_take_turns_and_a_crash_brings_the_last_one_back(
    models: Models, tmp_path: Path, merge: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for version in (1, 2):
        make_adapter(models.base, checkpoints / f"policy-{version:06d}", version, seed=version)
    full = checkpoints / "policy-000003"
    shutil.copytree(models.folder(1), full)
    write_checkpoint_files(full, 3, models.base)
    make_adapter(full, checkpoints / "policy-000004", 4, seed=4)
    with otlp_sink() as (_, url):
        arguments = ("--collector", url, "--checkpoints", str(checkpoints))
        setting = {"TRAINSPAN_SERVING__MERGE_ADAPTERS": merge}
        first_adapter = checkpoints / "policy-000001"
        with policy_server(first_adapter, tmp_path / "home", *arguments, environment=setting) as server:
            state = server.policy()
            assert (state["version"], state["kind"], state["base"]) == (1, "lora", models.base.name)
            first = greedy(server)
            assert first[1] == "1"
            answers = {}
            for version in (2, 3, 4):
                status, answer = server.swap(f"policy-{version:06d}", version)
                assert (status, answer["canary"]["status"]) == (200, "fresh"), answer
                assert answer["canary"]["tensors_equal"] > 0
                # Version 2 is merged into weights with a buffer that models compute, which no kernel holds.
                n_buffers = 1 if (merge, version) == ("true", 2) else 0
                assert (answer["canary"]["tensors_differing"], answer["canary"]["tensors_unknown"]) == (0, n_buffers)
                answers[version] = greedy(server)
                assert answers[version][1] == str(version)
            assert len({tuple(ids) for ids, _ in (first, *answers.values())}) == 4
            status, answer = server.swap("policy-000002", 2)
            assert status == 400
            assert "was trained on" in answer["error"]  # the first base, which is no longer in service

            (child,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)
            assert server.process.stdout is not None
            assert '"version": 4' in server.process.stdout.readline()
            state = server.policy()
            assert (state["version"], state["kind"], state["base"]) == (4, "lora", "policy-000003")
            assert greedy(server) == answers[4]

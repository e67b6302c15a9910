"""A policy server over TLS: vLLM's flags, and `SSL_CERT_FILE` for its clients."""

import shutil
from pathlib import Path

import openai
import pytest

from tests.serving.support.servers import Models
from tests.support.policy_server.process import policy_server
from tests.support.tls import make_certificate
from trainspan_cli.main import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_swap_and_an_agents_call_go_over_tls(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, checkpoints = make_certificate(tmp_path), tmp_path / "checkpoints"
    shutil.copytree(models.checkpoints, checkpoints)
    flags = ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
    arguments = ("--checkpoints", str(checkpoints), "--collector", "none")
    with policy_server(models.base, tmp_path / "home", *arguments, flags=flags) as server:
        url = server.url
        assert url.startswith("https://127.0.0.1:")
        monkeypatch.setenv("TRAINSPAN_HOME", str(server.home))
        swap = ["swap", "1", "--checkpoints", str(checkpoints), "--policy-url", url, "--publish-timeout-s"]
        assert run([*swap, "1"]) == 1
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(files.certificate))
        assert run([*swap, "60"]) == 0
        assert f"policy-000001 is in service at {url}, canary fresh" in capsys.readouterr().out
        agent = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        answer = agent.chat.completions.with_raw_response.create(
            model="policy", messages=[{"role": "user", "content": "hello"}]
        )
        assert answer.headers["x-trainspan-policy-version"] == "1"

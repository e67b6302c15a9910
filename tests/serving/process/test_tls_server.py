"""A policy server over TLS: vLLM's flags, and `SSL_CERT_FILE` for its clients."""

from pathlib import Path

import openai
import pytest

from tests.serving.support.servers import Models
from tests.support.policy_server.process import policy_server
from tests.support.tls import make_certificate
from trainspan_training.checkpoints.swap_request import publish, served_folders

pytestmark = pytest.mark.slow


def test_the_trainer_swaps_and_agents_call_over_tls(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_certificate(tmp_path)
    flags = ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
    arguments = ("--checkpoints", str(models.checkpoints), "--collector", "none")
    with policy_server(models.base, tmp_path / "home", *arguments, flags=flags) as server:
        url = server.url.replace("http://", "https://")
        monkeypatch.setenv("TRAINSPAN_HOME", str(server.home))
        untrusting = publish(url, models.folder(1).name, 1, retry_for_s=1, was_there=False)
        assert untrusting.outcome == "unreachable"
        assert "CERTIFICATE_VERIFY_FAILED" in str(untrusting.error)
        monkeypatch.setenv("SSL_CERT_FILE", str(files.certificate))
        assert publish(url, models.folder(1).name, 1, retry_for_s=60, was_there=True).outcome == "swapped"
        assert models.folder(1).name in served_folders(url)
        agent = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        answer = agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
        assert answer.choices[0].message.content is not None

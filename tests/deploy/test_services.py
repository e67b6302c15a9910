"""A collector with the files and settings of the manifests, its health check, a sender, and a reader with a token from a file."""

import subprocess
import sys
import time
from pathlib import Path

from tests.deploy.manifests import DEPLOY
from tests.support.ports import free_port

SECRETS = "/run/secrets/trainspan"


def run(*command: object, **environ: str) -> "subprocess.CompletedProcess[str]":
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run(
        [str(word) for word in command],
        env={"PATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_collector_of_the_manifests_is_ready_and_takes_and_gives_data_over_tls(tmp_path: Path) -> None:
    secrets, home = tmp_path / "secrets", tmp_path / "home"
    assert run(DEPLOY / "make_secrets.sh", secrets, "localhost").returncode == 0
    ports = {4317: free_port(), 4318: free_port(), 4319: free_port()}
    settings = (DEPLOY / "kubernetes" / "trainspan.toml").read_text().replace(SECRETS, str(secrets / "collector"))
    for default, port in ports.items():
        settings = settings.replace(f'"0.0.0.0:{default}"', f'"127.0.0.1:{port}"')
    (tmp_path / "trainspan.toml").write_text(settings)
    probe = (sys.executable, DEPLOY / "containers" / "probe.py", ports[4318], "/readyz")
    assert run(*probe).returncode == 1
    collector = subprocess.Popen(
        [sys.executable, "-m", "trainspan_cli", "collector", "--config", str(tmp_path / "trainspan.toml")],
        env={"PATH": "/usr/bin:/bin", "TRAINSPAN_HOME": str(home)},
    )
    try:
        deadline = time.monotonic() + 60
        while run(*probe).returncode != 0:
            assert collector.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        store = f"grpc+tls://localhost:{ports[4319]}"
        read = ("trainspan", "sql", "--store", store, "--format", "csv", "SELECT count(*) AS rewards FROM evaluations")
        trusted = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(secrets / "trainer" / "ca.crt")}
        elsewhere = {"TRAINSPAN_HOME": str(tmp_path / "elsewhere")}
        collector_url = f"https://localhost:{ports[4317]}"
        reward = ("trainspan", "reward", "--rollout", "r1", "--value", "1", "--collector", collector_url)
        given = (*reward, "--token-file", secrets / "runner" / "tokens.toml")
        assert run(*given, **elsewhere, **trusted).returncode == 0
        assert "UNAVAILABLE" in run(*given, **elsewhere).stderr
        reader = DEPLOY / "containers" / "with_token.sh"
        done = run(reader, secrets / "trainer" / "reader-token", *read, **elsewhere, **trusted)
        assert (done.returncode, done.stdout.split()) == (0, ["rewards", "1"]), done.stderr
        denied = run(reader, secrets / "authority" / "token-agent", *read, **elsewhere, **trusted)
        assert (denied.returncode, denied.stdout) == (1, "")
    finally:
        collector.terminate()
        assert collector.wait(60) == 0

"""The scripts: secrets that the product accepts, health checks, wrappers, and no complaint of shellcheck."""

import os
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography import x509

from tests.deploy.manifests import DEPLOY, ROOT, shell_files
from tests.support.ports import free_port
from tests.support.tls import make_certificate
from trainspan_collector.network.access import Access, Right
from trainspan_schemas.store.roles import Role, read_tokens, token_of
from trainspan_schemas.telemetry.signing import signing_key


def run(*command: object, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_shellcheck_has_no_complaint() -> None:
    files = [file.relative_to(ROOT) for file in shell_files()]
    assert len(files) >= 8
    done = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", "--external-sources", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


NAMES = ("collector", "*.policy-servers.trainspan.svc", "10.0.0.7")


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy") / "secrets"
    done = run(DEPLOY / "make_secrets.sh", folder, *NAMES)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_other_user_can_read_the_secrets(secrets: Path) -> None:
    for path in (secrets, *secrets.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_each_process_gets_the_tokens_of_its_roles_and_the_collector_accepts_them(secrets: Path) -> None:
    access = Access.from_file(secrets / "collector" / "tokens.toml")
    assert set(read_tokens(secrets / "policy" / "tokens.toml")) == {Role.SERVING}
    assert set(read_tokens(secrets / "runner" / "tokens.toml")) == {Role.RUNNER, Role.AGENT}
    held = {
        Role.SERVING: token_of(secrets / "policy" / "tokens.toml", Role.SERVING),
        Role.RUNNER: token_of(secrets / "runner" / "tokens.toml", Role.RUNNER),
        Role.AGENT: token_of(secrets / "runner" / "tokens.toml", Role.AGENT),
        Role.READER: (secrets / "trainer" / "reader-token").read_text().strip(),
    }
    for role, token in held.items():
        right = Right.READ if role is Role.READER else Right.WRITE
        assert access.authorize(right, f"Bearer {token}") is role
    assert not {path.name for path in (secrets / "agent").iterdir()} - {"ca.crt", "trust.pem"}


def test_runner_and_server_sign_with_one_key_and_the_trainer_has_the_servers_token(secrets: Path) -> None:
    keys = {signing_key(str(secrets / name / "signing-key")) for name in ("runner", "policy")}
    assert len(keys) == 1
    assert (secrets / "policy" / "token").read_text() == (secrets / "trainer" / "token").read_text()


def test_the_certificate_is_the_authoritys_and_names_the_hosts(secrets: Path) -> None:
    for process in ("collector", "policy"):
        certificate = secrets / process / "tls.crt"
        assert run("openssl", "verify", "-CAfile", secrets / "policy" / "ca.crt", certificate).returncode == 0
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(name.value) for name in names] == list(NAMES)
        ssl.create_default_context().load_cert_chain(certificate, secrets / process / "tls.key")
    assert [path.parent.name for path in secrets.glob("*/ca.key")] == ["authority"]


def test_a_second_call_keeps_tokens_and_authority_and_renews_the_certificate(secrets: Path) -> None:
    before = {path: path.read_bytes() for path in secrets.rglob("*") if path.is_file()}
    assert run(DEPLOY / "make_secrets.sh", secrets, *NAMES).returncode == 0
    changed = {path.relative_to(secrets).as_posix() for path, data in before.items() if path.read_bytes() != data}
    assert {"collector/tls.crt", "collector/tls.key", "policy/tls.crt", "policy/tls.key"} <= changed
    assert all(name.partition("/")[0] == "authority" or "/tls." in name for name in changed)
    assert not {"authority/ca.crt", "authority/ca.key", "authority/signing-key"} & changed


def test_a_failure_leaves_no_empty_secret(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "openssl").write_text("#!/bin/sh\nexit 1\n")
    (programs / "openssl").chmod(0o755)
    folder = tmp_path / "secrets"
    done = run(DEPLOY / "make_secrets.sh", folder, *NAMES, PATH=f"{programs}:{os.environ['PATH']}")
    assert done.returncode != 0
    assert run(DEPLOY / "make_secrets.sh", folder, *NAMES).returncode == 0
    (folder / "authority" / "signing-key").write_text("")
    done = run(DEPLOY / "make_secrets.sh", folder, *NAMES)
    assert (done.returncode, done.stderr) == (
        1,
        f"make_secrets.sh: {folder}/authority/signing-key is empty: delete it\n",
    )


@pytest.mark.parametrize("folder", ["secrets", "deploy/secrets"])
def test_git_ignores_the_secrets(folder: str) -> None:
    """The folders that README.md and compose.yaml name."""
    assert run("git", "-C", ROOT, "check-ignore", "--quiet", f"{folder}/authority/ca.key").returncode == 0


def test_without_a_host_name_it_says_how_it_is_used(tmp_path: Path) -> None:
    done = run(DEPLOY / "make_secrets.sh", tmp_path / "none")
    assert (done.returncode, done.stderr) == (2, "usage: make_secrets.sh FOLDER NAME…\n")
    assert not (tmp_path / "none").exists()


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(params=["http", "https"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """A server that is ready."""
    server = HTTPServer(("127.0.0.1", 0), _Answer)
    if request.param == "https":
        files = make_certificate(tmp_path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("path", "code"), [("/readyz", 0), ("/other", 1)])
def test_a_probe_tells_ready_from_not_ready_with_and_without_tls(port: int, path: str, code: int) -> None:
    proxy = "http://127.0.0.1:9"
    probe = DEPLOY / "containers" / "probe.py"
    done = run(sys.executable, probe, port, path, http_proxy=proxy, https_proxy=proxy)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_probe_of_nothing_fails() -> None:
    assert run(sys.executable, DEPLOY / "containers" / "probe.py", free_port(), "/readyz").returncode == 1


@pytest.fixture
def printing(tmp_path: Path) -> dict[str, str]:
    """An environment in which `trainspan` prints its arguments and the headers."""
    program = tmp_path / "bin" / "trainspan"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$*|${OTEL_EXPORTER_OTLP_HEADERS:-}"\n')
    program.chmod(0o755)
    home = tmp_path / "home"
    (home / "checkpoints").mkdir(parents=True)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "TRAINSPAN_HOME": str(home)}


def test_a_server_starts_with_the_model_until_there_is_a_checkpoint(printing: dict[str, str], tmp_path: Path) -> None:
    script = DEPLOY / "containers" / "serve_newest.sh"
    assert run(script, "/model", "--host", "x", **printing).stdout == "serve /model --host x|\n"
    (tmp_path / "home" / "checkpoints" / "latest").touch()
    assert run(script, "/model", "--host", "x", **printing).stdout == "serve --host x|\n"
    elsewhere = {**printing, "TRAINSPAN_SERVING__CHECKPOINTS": str(tmp_path)}
    assert run(script, "/model", **elsewhere).stdout == "serve /model|\n"


def test_a_reader_takes_its_token_from_a_file(printing: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    script = DEPLOY / "containers" / "with_token.sh"
    done = run(script, tmp_path / "token", "trainspan", "dataset", "--wait-s", "3", **printing)
    assert done.stdout == "dataset --wait-s 3|authorization=Bearer%20abc\n"
    assert run(script, tmp_path / "none", "trainspan", "dataset", **printing).returncode != 0

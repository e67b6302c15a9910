"""Missing prerequisites are reported in one line, before anything is installed or run."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import ROOT, make_place

PREFLIGHT = ROOT / "tools" / "preflight.py"


def preflight(pretend: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    program = f"import sys, platform\n{pretend}\nexec(open({str(PREFLIGHT)!r}).read())"
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("pretend", "environ", "message"),
    [
        ("sys.version_info = (3, 9, 2)", {}, "Python 3.9 is not supported: install Python 3.11 to 3.13"),
        ("sys.version_info = (3, 14, 0)", {}, "Python 3.14 is not supported"),
        ("platform.system = lambda: 'Darwin'", {}, "Darwin on x86_64 is not supported"),
        ("", {"TRAINSPAN_SETUP_GIB": "1000000"}, "1000000 GiB needed"),
    ],
)
def test_a_machine_that_does_not_fit_gets_one_line(pretend: str, environ: dict[str, str], message: str) -> None:
    done = preflight(pretend, **environ)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_machine_that_fits_gets_no_message() -> None:
    done = preflight("", TRAINSPAN_SETUP_GIB="0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_unreachable_index_gets_one_line(tmp_path: Path) -> None:
    for name in ("tools", "constraints"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    environ |= {"PIP_NO_CACHE_DIR": "1", "PYTHON": sys.executable, "TRAINSPAN_SETUP_GIB": "0"}
    done = subprocess.run(
        ["make", "setup"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("trainspan: ")]
    assert len(ours) == 1
    assert "the package index cannot be reached" in ours[0]
    assert not (tmp_path / ".venv" / "setup-done").exists()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize("variable", ["TRAINSPAN_SERVING__PORT", "TRAINSPAN_COLLECTOR__GRPC"])
def test_a_port_in_use_ends_the_demo_with_one_line(variable: str, taken_port: int, tmp_path: Path) -> None:
    place = make_place(tmp_path / "home")
    value = str(taken_port) if variable.endswith("PORT") else f"127.0.0.1:{taken_port}"
    done = subprocess.run(
        [sys.executable, "examples/calculator/demo.py"],
        cwd=ROOT,
        env={**place.environ, variable: value},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"trainspan: port {taken_port} ({'policy server' if 'SERVING' in variable else 'OTLP'}) is in use: "
        f"stop what listens there, or set {variable}"
    )
    assert not (tmp_path / "home").exists()


def test_a_setting_that_does_not_exist_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "examples/calculator/demo.py"],
        cwd=ROOT,
        env={**make_place(tmp_path / "home").environ, "TRAINSPAN_LOOP__ROUND": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("trainspan: ")
    assert "TRAINSPAN_LOOP__ROUND" in line

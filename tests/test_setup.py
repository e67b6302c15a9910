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


GPUS = """
from trainspan_schemas import gpus
def driver(version, *names):
    gpus.installed_gpus = lambda: gpus.Gpus(names, version)
def free(gib):
    import shutil, types
    shutil.disk_usage = lambda _: types.SimpleNamespace(free=gib * 2**30)
driver(None)
"""


def preflight(pretend: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    program = (
        f"import sys, platform\nsys.path.insert(0, 'schemas')\n{GPUS}{pretend}\nexec(open({str(PREFLIGHT)!r}).read())"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
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
        ("platform.libc_ver = lambda: ('glibc', '2.28')", {}, "glibc 2.28 is not supported"),
        (
            "platform.libc_ver = lambda: ('', '')",
            {},
            "this C library is not supported: packages are built for glibc 2.31",
        ),
        ("", {"TRAINSPAN_SETUP_GIB": "1000000"}, "1000000 GiB needed"),
        ("free(13.9); driver('580.95.05', 'NVIDIA H100')", {}, "13.9 GiB free here, 14 GiB needed"),
        ("free(5.9)", {}, "5.9 GiB free here, 6 GiB needed"),
        (
            "driver('575.57', 'NVIDIA L4')",
            {"MAKE_GOAL": "demo"},
            "NVIDIA L4, driver 575.57: CUDA 13 needs a driver of branch 580 or later: update it, or install CPU builds "
            "with `CUDA_VISIBLE_DEVICES= make demo`",
        ),
        ("driver(None, 'NVIDIA GPU')", {}, "NVIDIA GPU, driver unknown: its driver does not answer"),
    ],
)
def test_a_machine_that_does_not_fit_gets_one_line(pretend: str, environ: dict[str, str], message: str) -> None:
    done = preflight(pretend, **environ)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("pretend", "environ", "builds"),
    [
        ("free(8.1)", {}, "cpu"),
        ("free(14.1); driver('580.65.06', 'NVIDIA H100')", {}, "gpu"),
        ("free(8.1); driver('535.1', 'NVIDIA H100')", {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
    ],
)
def test_a_machine_that_fits_is_told_its_builds(pretend: str, environ: dict[str, str], builds: str) -> None:
    done = preflight(pretend, **environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{builds}\n", "")


def test_an_unreachable_index_gets_one_line(tmp_path: Path) -> None:
    for name in ("tools", "constraints", "schemas"):
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
    setting = "[serving] port" if "SERVING" in variable else "[collector] grpc"
    assert done.stderr.startswith(f"trainspan: {setting} 127.0.0.1:{taken_port} is in use by pid {os.getpid()} (")
    assert done.stderr.endswith(": stop that, or take other ports with --set ports.base=0 or TRAINSPAN_PORTS__BASE=0\n")
    assert len(done.stderr.splitlines()) == 1
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

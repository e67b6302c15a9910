"""The guard against unnoticed skipped tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

HEAD = "import pytest\nfrom tests.support.skips import ADMITTED\n"
CONFTEST = "from tests.support.skips import SkipGuard\n\ndef pytest_configure(config):\n    config.pluginmanager.register(SkipGuard())\n"


ADMITTED_ONES = [
    "def test_it():\n    pass\n",
    "def test_it():\n    pytest.skip(next(iter(ADMITTED)))\n",
    "@pytest.mark.xfail(reason='known')\ndef test_it():\n    assert False\n",
]
OTHERS = [
    "def test_it():\n    pytest.skip('no time today')\n",
    "@pytest.mark.skip(reason='no time today')\ndef test_it():\n    pass\n",
    "pytest.skip('no time today', allow_module_level=True)\n",
    "pytest.importorskip('no_such_module_here', reason='no time today')\n",
]


@pytest.mark.parametrize(("bodies", "n_named"), [(ADMITTED_ONES, 0), (ADMITTED_ONES + OTHERS, len(OTHERS))])
def test_only_skips_whose_reason_is_listed_leave_the_run_green(tmp_path: Path, bodies: list[str], n_named: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number, body in enumerate(bodies):
        (tmp_path / f"test_{number}.py").write_text(HEAD + body)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == bool(n_named), done.stdout
    named = [line for line in done.stdout.splitlines() if "does not admit" in line]
    assert len(named) == n_named
    assert all("no time today" in line for line in named)

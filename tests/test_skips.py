"""The guard against tests that are skipped unseen."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

HEAD = "import pytest\nfrom tests.support.skips import ADMITTED\n"
CONFTEST = "from tests.support.skips import SkipGuard\n\ndef pytest_configure(config):\n    config.pluginmanager.register(SkipGuard())\n"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("def test_it():\n    pass\n", 0),
        ("def test_it():\n    pytest.skip(next(iter(ADMITTED)))\n", 0),
        ("def test_it():\n    pytest.skip('no time today')\n", 1),
        ("@pytest.mark.skip(reason='no time today')\ndef test_it():\n    pass\n", 1),
        ("pytest.skip('no time today', allow_module_level=True)\n", 1),
        ("pytest.importorskip('no_such_module_here', reason='no time today')\n", 1),
        ("@pytest.mark.xfail(reason='known')\ndef test_it():\n    assert False\n", 0),
    ],
)
def test_only_a_skip_whose_reason_is_listed_leaves_the_run_green(tmp_path: Path, body: str, code: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(HEAD + body)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert ("does not admit" in done.stdout) == bool(code)
    assert ("no time today" in done.stdout) == bool(code)

"""A skipped test verifies nothing: a run fails on every skip without a reason listed here."""

from typing import Any, Final

import pytest

__all__ = ["ADMITTED", "SkipGuard"]

ADMITTED: Final = {
    "no Chromium here: apt-get install chromium": "`.ci/run` installs one, so these tests run before anything is merged",
    "no Debian packages here: Go and its OpenTelemetry are unpacked from them": "slow tests of the Go agent only; Node's run anywhere",
    "no nginx here: apt-get install nginx-light": "the balancer in front of policy servers, which are tested without it",
    "no NVIDIA GPU is here": "tests marked gpu; one that is there and not usable fails them",
    "no package index is reached here": "`make setup` resolves the same constraints where packages can be installed",
    "this coding harness cannot be installed here": "slow tests of one harness each, by its name; connections are tested anywhere",
    "rotel has wheels for x86_64 and glibc 2.34 only": "the relay is one of several independent clients; the others run everywhere",
}
"""Reason given for a skip → why it is harmless."""


class SkipGuard:
    """A pytest plugin that reports unlisted skips and turns the run's exit code into 1."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._check(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._check(report)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self._found:
            terminalreporter.write_line(f"skip that tests/support/skips.py does not admit: {line}", red=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _check(self, report: Any) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if reason not in ADMITTED:
            self._found.append(f"{report.nodeid}: {reason}")

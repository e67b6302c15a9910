"""Frameworks that nobody here wrote: what the engine served is stored and counted once, and the program notices nothing.

The slow tests install packages from the registries. `python -m tests.end_to_end.matrix.table` writes their results into
`docs/agents.md`.
"""

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.matrix.cases import CASES, Case
from tests.end_to_end.matrix.conftest import Matrix, Ran, key_of
from tests.end_to_end.matrix.environments import PINS, PROGRAMS, Installer
from tests.end_to_end.matrix.table import CACHE, Result

_CHANGES = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+")
"""UUIDs and numbers."""


def test_each_program_is_of_a_case_and_each_python_case_is_pinned() -> None:
    programs = {
        str(path.relative_to(PROGRAMS))
        for path in PROGRAMS.rglob("*.*")
        if path.suffix in (".py", ".ipynb", ".mjs", ".sh", ".go")
    }
    assert programs == {case.program for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES) >= 20
    pinned = {path.stem for path in PINS.glob("*.txt")}
    assert pinned == {case.name for case in CASES if case.is_python}
    for program in programs:
        assert "trainspan" not in (PROGRAMS / program).read_text()


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_an_ordinary_program_is_captured_whole_and_notices_nothing(
    matrix: Matrix, packages: Installer, case: Case, tmp_path: Path, cache: pytest.Cache
) -> None:
    with packages.environment(case, tmp_path / "environment") as commands:
        results = [_measure(matrix, case, mode, commands) for mode in case.modes]
    for result in results:
        cache.set(f"{CACHE}/{case.name}-{result.mode}", asdict(result))
    for result in results:
        assert not result.wrong, result.wrong


def _measure(matrix: Matrix, case: Case, mode: str, commands: Path) -> Result:
    bare = matrix.run(case, mode, commands, traced=False)
    traced = matrix.run(case, mode, commands, traced=True)
    key = key_of(case, mode, traced=True)
    served, rollouts = matrix.stack.engine_calls(key), matrix.rollouts(case, mode)
    seen = Result(
        mode, served=len(served), bare_s=bare.seconds, traced_s=traced.seconds, wrong=_differences(case, bare, traced)
    )
    if len(rollouts) != 1 or None in rollouts:
        return replace(seen, wrong=(*seen.wrong, f"{len(rollouts)} rollouts"))
    (rollout_id,) = (str(one) for one in rollouts)
    expected = len(served) if case.is_python else 0
    calls, rollout = matrix.stack.calls(rollout_id, len(served)), matrix.stack.rollout(rollout_id, expected)
    kept, dropped = matrix.kept()
    seen = replace(
        seen,
        stored=len(calls),
        counted=rollout["n_calls"],
        status=rollout["status"],
        agents=tuple(sorted({str(call["agent"]) for call in calls})),
        trained=kept,
        dropped=dropped,
    )
    return replace(seen, wrong=(*seen.wrong, *_faults(case, seen, calls, served)))


def _faults(case: Case, seen: Result, calls: list[dict[str, Any]], served: list[dict[str, Any]]) -> list[str]:
    """The faults of the stored calls and of the stored rollout."""
    stored, made = (
        [(list(one["prompt_ids"]), list(one["completion_ids"])) for one in some] for some in (calls, served)
    )
    counted = seen.served if case.is_python else None
    checks = {
        f"{seen.served} served, {seen.stored} stored, {seen.counted} counted": 0 < seen.served == seen.stored
        and seen.counted == counted,
        "the stored tokens are not the engine's": sorted(stored) == sorted(made),
        f"status {seen.status}": seen.status == "ok",
        f"agents {seen.agents}": all(agent.startswith(case.agent) for agent in seen.agents),
        f"not trained: {dict(seen.dropped)}": seen.trained == seen.served,
    }
    return [what for what, is_right in checks.items() if not is_right]


def _differences(case: Case, bare: Ran, traced: Ran) -> tuple[str, ...]:
    """Signs of tracing that the program shows, if the runner did not start it."""
    found = []
    if bare.code:
        found.append(f"the bare run ended with {bare.code}: {bare.stderr[-1500:]}")
    if traced.code != bare.code:
        found.append(f"exit code {traced.code} instead of {bare.code}: {traced.stderr[-1500:]}")
    if case.is_python and traced.stdout != bare.stdout:
        found.append(f"stdout {traced.stdout[-500:]!r} instead of {bare.stdout[-500:]!r}")
    if case.is_python and (more := _more(bare.stderr, traced.stderr)):
        found.append(f"stderr has also {more}")
    return tuple(found)


def _more(bare: str, traced: str) -> list[str]:
    """Lines of the traced run only; times and random ids in them do not count."""
    known = {_CHANGES.sub("#", line) for line in bare.splitlines()}
    return [line for line in traced.splitlines() if _CHANGES.sub("#", line) not in known]

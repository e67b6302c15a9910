"""The public API of `import trainspan`, without an exporter or SDK."""

import asyncio
import subprocess
import sys
import uuid

import pytest

import trainspan
from trainspan._rollout.scope import current_scope
from trainspan_schemas.telemetry.identity import TraceParent


def test_the_exported_names_are_these() -> None:
    assert trainspan.__all__ == ["Rollout", "reward", "rollout"]


def test_the_import_is_light() -> None:
    program = (
        "import sys, trainspan\n"
        "heavy = {'torch', 'polars', 'duckdb', 'pyarrow', 'grpc', 'httpx', 'httpx2', 'requests', 'aiohttp', 'openai', 'typer'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rollout_has_ids_without_any_sdk_and_inner_blocks_join_it() -> None:
    with trainspan.rollout(task_id="t1") as outer:
        parent = TraceParent.parse(outer.traceparent)
        assert parent is not None
        assert len(outer.id) == 32
        with trainspan.rollout(task_id="t2") as inner:
            assert inner.id == outer.id
            inside = TraceParent.parse(inner.traceparent)
            assert inside is not None
            assert inside.trace_id == parent.trace_id
        trainspan.reward(1)
    with trainspan.rollout(rollout_id="mine") as other:
        assert other.id == "mine"
        assert other.traceparent != outer.traceparent


def test_each_call_of_a_decorated_function_is_a_separate_rollout_synchronous_or_not() -> None:
    traceparents: list[str] = []

    @trainspan.rollout(task_id="t1")
    def solve(number: int) -> int:
        with trainspan.rollout() as here:
            traceparents.append(here.traceparent)
        return number + 1

    @trainspan.rollout(task_id="t1")
    async def solve_async(number: int) -> int:
        return solve(number)

    assert (solve(1), asyncio.run(solve_async(2)), solve.__name__) == (2, 3, "solve")
    assert len({TraceParent.parse(text).trace_id for text in traceparents}) == 2  # type: ignore[union-attr]


def test_an_exception_passes_through_a_rollout() -> None:
    with pytest.raises(KeyError, match="gone"), trainspan.rollout():
        raise KeyError("gone")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_a_finite_number_is_an_error(value: float) -> None:
    with pytest.raises(ValueError, match="finite number"):
        trainspan.reward(value)


def test_the_runner_is_told_of_the_rewards_of_the_whole_rollout_alone() -> None:
    with trainspan.rollout(task_id="t1") as block:
        scope = current_scope()
        assert scope is not None
        trainspan.reward(0.25)
        trainspan.reward(0.5, of="call")
        trainspan.reward(2.0, "style")
        block.reward(1.0)
        block.reward(4.0, "style")
    assert scope.report().rewards == [0.25, 1.0]


def test_an_id_that_is_not_a_string_is_its_text() -> None:
    given = uuid.UUID(int=7)
    with trainspan.rollout(task_id=0, rollout_id=given, run_id=1.5) as block:
        assert block.id == str(given)
        scope = current_scope()
        assert scope is not None
        assert (scope.identity.task_id, scope.identity.run_id) == ("0", "1.5")
    with trainspan.rollout(rollout_id=0) as other:
        assert other.id == "0"


def test_misuse_raises() -> None:
    with pytest.raises(ValueError, match="attempt is '100000000000000000000000'; it must be a whole number from 0"):
        trainspan.rollout(attempt=10**23)
    with pytest.raises(ValueError, match=r"task\.id has 4097 characters"):
        trainspan.rollout(task_id="x" * 4097)
    unused = trainspan.rollout()
    with pytest.raises(RuntimeError, match="has not begun"):
        unused.reward(1.0)
    with pytest.raises(ValueError, match="of="):
        trainspan.reward(1.0, of="episode")  # type: ignore[arg-type]
    with trainspan.rollout() as used, pytest.raises(RuntimeError, match="already entered"):
        used.__enter__()

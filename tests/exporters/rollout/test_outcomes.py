"""How a block ends: with errors that cannot be shown, and with what a decorated function leaves for later."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainspan
from tests.exporters.rollout.test_suspended_blocks import ask
from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan._rollout.scope import Scope, current_scope
from trainspan_schemas.telemetry import keys


def test_an_error_that_cannot_be_shown_ends_its_rollout_and_is_the_one_that_the_program_gets(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = """
    import trainspan

    class NoText(Exception):
        def __str__(self):
            return f"tool {self.tool.name} failed"

    class NoRepr(NoText):
        def __repr__(self):
            return f"NoRepr({self.code})"

    for error in (NoText("x"), NoRepr("y")):
        name = type(error).__name__
        try:
            with trainspan.rollout(task_id=name):
                raise error
        except Exception as caught:
            assert caught is error
        try:
            with trainspan.rollout(task_id=f"joined {name}"), trainspan.rollout():
                raise error
        except Exception as caught:
            assert caught is error
    trainspan.reward(1.0)
    raise NoRepr("z")
    """
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert ran.code == 1
    assert "event=" not in ran.stderr
    rollouts = {span.attributes.get(keys.TASK_ID): span for span in recorder.named(keys.ROLLOUT_SPAN_NAME)}
    assert rollouts.keys() == {"NoText", "NoRepr", "joined NoText", "joined NoRepr", None}
    assert {span.attributes[keys.ROLLOUT_STATUS] for span in rollouts.values() if span is not rollouts[None]} == {
        "agent_error"
    }
    assert rollouts["NoText"].message == "NoText('x')"
    assert rollouts["NoRepr"].message == "<NoRepr>"
    (exception,) = [event for name, event in rollouts["NoRepr"].events if name == "exception"]
    assert (exception["exception.type"], exception["exception.message"]) == ("__main__.NoRepr", "<NoRepr>")
    assert "raise error" in exception["exception.stacktrace"]
    assert [span.message for span in recorder.named("trainspan.block")] == ["NoText('x')", "<NoRepr>"]
    assert "exception" in [name for name, _ in rollouts[None].events], "of the process, which other rollouts replaced"


def test_what_a_plain_function_returns_for_later_belongs_to_its_rollout(fresh: None) -> None:
    asked: list[str | None] = []

    async def work(answer: int) -> int:
        asked.append(ask())
        await asyncio.sleep(0)
        asked.append(ask())
        return answer

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("gone")

    def steps() -> Iterator[str | None]:
        asked.append((yield ask()))
        asked.append(ask())

    async def async_steps() -> AsyncIterator[str | None]:
        asked.append(ask())
        yield ask()

    scopes: dict[str, Scope] = {}

    def decorated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @trainspan.rollout(task_id=name)
        def begin(*arguments: Any) -> Any:
            scope = current_scope()
            assert scope is not None
            assert ask() == name
            scopes[name] = scope
            return function(*arguments)

        return begin

    async def main() -> None:
        waiting = decorated("coroutine", work)(3)
        assert ask() is None
        assert scopes["coroutine"].status is None
        assert await waiting == 3
        task = decorated("task", lambda: asyncio.create_task(work(4)))()
        assert ask() is None
        assert await task == 4
        await asyncio.sleep(0)
        with pytest.raises(KeyError):
            await decorated("failing", fail)()
        task = decorated("failing task", lambda: asyncio.create_task(fail()))()
        with pytest.raises(KeyError):
            await task
        task = decorated("cancelled task", lambda: asyncio.create_task(fail()))()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert [step async for step in decorated("async steps", async_steps)()] == ["async steps"]

    asyncio.run(main())
    generator = decorated("steps", steps)()
    assert next(generator) == "steps"
    assert ask() is None
    with pytest.raises(StopIteration):
        generator.send("sent")
    assert asked == ["coroutine"] * 2 + ["task"] * 2 + ["async steps", "sent", "steps"]
    assert {name: scope.status for name, scope in scopes.items()} == {
        "coroutine": "ok",
        "task": "ok",
        "failing": "agent_error",
        "failing task": "agent_error",
        "cancelled task": "cancelled",
        "async steps": "ok",
        "steps": "ok",
    }

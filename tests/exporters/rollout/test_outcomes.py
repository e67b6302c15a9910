"""How a block ends: with errors that cannot be shown, and with what a decorated function leaves for later."""

from pathlib import Path

from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from tests.support.otlp.recorder import OtlpRecorder
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

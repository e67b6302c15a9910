"""What a failed rollout says, and rollouts whose model calls the policy server did not get."""

import pytest

from tests.rollouts.agents.test_functions import rollouts, statuses, tasks
from tests.rollouts.conftest import Run
from tests.support.agents.openai_server import OpenAIServer
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_rollouts.executors.agent_process import _last_lines

OVERFLOW = (
    "This model's maximum context length is 24000 tokens. However, your prompt contains at least 24001 input tokens"
)


@pytest.fixture
def error_of(run: Run, policy: OpenAIServer, recorder: OtlpRecorder) -> object:
    """`error_of(shell script, settings, **what the server tells)`: status and error of its only attempt."""

    def rolled(script: str, told: dict[str, object], **settings: object) -> tuple[str, str | None]:
        policy.failures = lambda: {"failures": 0, "up_s": 1e6, **told}
        run("", tasks("x"), "sh", "-c", script, **{"retries": 0, **settings})
        (status,) = statuses(recorder).values()
        return status, rollouts(recorder)["x", 0].message or None

    return rolled


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (
            {"calls": 0},
            "no model call of it reached the policy server: the agent must use the base URL that it gets (allow_no_calls "
            "accepts such rollouts)",
        ),
        (
            {"calls": 0, "unnamed": 3},
            "no model call of it reached the policy server (3 calls, of whomever, named no rollout): the agent must use the "
            "base URL that it gets (allow_no_calls accepts such rollouts)",
        ),
        (
            {"calls": 0, "unsigned": 2, "unnamed": 3},
            "its 2 model calls came without the runner's signature, and cannot be trained: pass on the whole base URL, and give "
            "the policy server the runner's key ([serving] signing_key_file) (allow_no_calls accepts such rollouts)",
        ),
    ],
)
def test_a_rollout_without_a_signed_call_is_an_infrastructure_failure(error_of, told, error) -> None:  # type: ignore[no-untyped-def]
    assert error_of("true", told) == ("infra_error", error)


def test_a_rollout_without_calls_is_ok_if_that_is_allowed_or_nobody_can_tell(error_of, run, policy) -> None:  # type: ignore[no-untyped-def]
    assert error_of("true", {"calls": 0}, allow_no_calls=True) == ("ok", None)
    policy.failures = lambda: None
    assert run("", tasks("x"), "true", run_id="again").status == {"ok": 1}


def test_an_error_has_the_last_words_of_both_outputs_and_the_servers_last_refusal(error_of) -> None:  # type: ignore[no-untyped-def]
    script = r"printf '\033[31mError: no\033[0m\n\ntokens used\n13,482\n' >&2; echo '  progress'; echo 'API Error: 400'; exit 3"
    refused = {"calls": 2, "refusal": "max_tokens must be positive"}
    assert error_of(script, refused) == (
        "agent_error",
        "exit code 3: Error: no / tokens used | stdout: API Error: 400; the policy server's last refusal: max_tokens must be positive",
    )


def test_an_agent_that_fails_after_its_prompt_outgrew_the_context_has_that_status(error_of) -> None:  # type: ignore[no-untyped-def]
    told = {"calls": 2, "overflows": 1, "refusal": OVERFLOW}
    assert error_of("exit 1", told) == (
        "context_overflow",
        f"exit code 1: ; the policy server's last refusal: {OVERFLOW}",
    )


def test_an_agent_that_goes_on_after_an_overflow_is_ok_and_the_log_has_the_refusal(error_of, caplog) -> None:  # type: ignore[no-untyped-def]
    assert error_of("true", {"calls": 2, "overflows": 1, "refusal": OVERFLOW}) == ("ok", None)
    (warning,) = [record.getMessage() for record in caplog.records if "event=prompt_too_long" in record.getMessage()]
    assert OVERFLOW in warning


def test_last_words_are_lines_that_say_something() -> None:
    trace = 'starting\nTraceback (most recent call last):\n  File "x.py", line 1\n    f()\nValueError: no \x1b[1midea\x1b[0m\n\n'
    assert _last_lines(trace) == "ValueError: no idea"
    assert _last_lines("a\n1\nb\n---\n  c\nd\ne\n") == "b / d / e"
    assert _last_lines("\x1b[0m\n\n") == _last_lines("") == ""
    assert _last_lines("x" * 1000) == "x" * 300

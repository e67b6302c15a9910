"""What the answers of the policy server say of it and of the rollout."""

import pytest
from opentelemetry.trace import INVALID_SPAN

from trainspan._calls.policy_request import PolicyRequest, answered, failed
from trainspan._rollout.scope import Scope
from trainspan_schemas.telemetry.identity import Identity


@pytest.fixture
def scope() -> Scope:
    return Scope(Identity("r", "run", "t", 0, 0), "explicit", INVALID_SPAN)


@pytest.mark.parametrize(
    ("status", "counts"),
    [
        (200, (1, False)),
        # The server fails: the runner tries again.
        (429, (0, True)),
        (500, (0, True)),
        (503, (0, True)),
        # The request is at fault.
        (400, (0, False)),
        (404, (0, False)),
        (422, (0, False)),
        (499, (0, False)),
    ],
)
def test_an_answer_counts_as_a_call_a_failure_or_a_refusal(scope: Scope, status: int, counts: tuple[int, bool]) -> None:
    answered(PolicyRequest(scope, True, None, "POST"), status, {})
    report = scope.report()
    assert (report.calls, report.policy_failing) == counts


def test_the_last_request_decides_whether_the_server_fails(scope: Scope) -> None:
    request = PolicyRequest(scope, True, None, "POST")
    failed(request)
    assert scope.report().policy_failing
    answered(request, 200, {})
    assert not scope.report().policy_failing
    answered(PolicyRequest(scope, False, None, "GET"), 500, {})
    assert (scope.report().calls, scope.report().policy_failing) == (1, False)

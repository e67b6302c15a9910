"""Makes each pytest test a rollout: `TRAINSPAN_BOUNDARY=test`. Its task is the test's node id; it fails with the test.

A test without policy requests and rewards is not a rollout.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt
from opentelemetry import context

from trainspan._guard import Args, Kwargs, guarded
from trainspan._rollout.boundary import tests_are_rollouts
from trainspan._rollout.scope import Scope
from trainspan._rollout.suspension import enter_test
from trainspan._rollout_block import begin_hosted, end_hosted

__all__ = ["watch_pytest"]


class TestFailed(Exception):
    """The phase in which a test failed, and the reason."""


def watch_pytest() -> None:
    """Wraps pytest's runner once it is imported."""
    wrapt.register_post_import_hook(guarded(_wrap), "_pytest.runner")


def _wrap(module: ModuleType) -> None:
    def run(wrapped: Callable[..., Any], _: Any, args: Args, kwargs: Kwargs) -> Any:
        scope = _begin(args[0] if args else kwargs["item"])
        if scope is None:
            return wrapped(*args, **kwargs)
        token = enter_test(scope)
        try:
            reports = wrapped(*args, **kwargs)
        finally:
            context.detach(token)
        _end(scope, reports)
        return reports

    wrapt.wrap_function_wrapper(module, "runtestprotocol", run)


@guarded
def _begin(item: Any) -> Scope | None:
    return begin_hosted("explicit", str(item.nodeid)) if tests_are_rollouts() else None


@guarded
def _end(scope: Scope, reports: Any) -> None:
    errors = [TestFailed(f"{report.when}: {_reason(report)}") for report in reports if report.failed]
    end_hosted(scope, "agent_error" if errors else "ok", errors[0] if errors else None)


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)

"""What `trainspan branch --format json` says of a run of branches."""

import json

from tests.loop.run_results import run_result
from trainspan_cli.branching.branch_run import BranchReport
from trainspan_processing.branches.values import BranchedCall, BranchedRollout
from trainspan_schemas.command_events import BranchesMeasured, event_line, parse


def call(index: int, unrewarded: int = 0) -> BranchedCall:
    return BranchedCall(index, "t", "s", None, 0, None, None, None, None, {}, unrewarded, ())


def test_the_record_has_every_rollout_and_the_totals_over_them() -> None:
    rollouts = (
        BranchedRollout("a", 0, "task", 1.0, is_other_policy=False, calls=(call(0), call(1, unrewarded=2))),
        BranchedRollout("b", 1, "task", 0.0, is_other_policy=True, calls=(call(0, unrewarded=1),)),
    )
    run = run_result(total=8, status={"ok": 6, "diverged": 2})
    event = BranchReport(run, rollouts, 3, {"no tokens": 1}, {"other run": 2}, 40).event()
    assert event_line(parse(event_line(event)) or event) == event_line(event)
    assert isinstance(parse(event_line(event)), BranchesMeasured)
    record = json.loads(event_line(event))
    assert record["rollouts"] == json.loads(json.dumps([rollout.record() for rollout in rollouts]))
    totals = {"states", "skipped_states", "skipped", "diverged", "unmeasured", "unrewarded", "of_other_policies"}
    assert {name: record[name] for name in totals | {"sampled_tokens", "total"}} == {
        "states": 3,
        "skipped_states": {"no tokens": 1},
        "skipped": {"other run": 2},
        "diverged": 0.25,
        "unmeasured": 2,
        "unrewarded": 3,
        "of_other_policies": 1,
        "sampled_tokens": 40,
        "total": 8,
    }

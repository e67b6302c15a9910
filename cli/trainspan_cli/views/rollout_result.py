"""Output of a run's result."""

from collections.abc import Mapping

from trainspan_schemas.command_events import UNFINISHED, RunResult

__all__ = ["exit_code", "print_table"]


def exit_code(result: "RunResult", *, is_part: bool = False) -> int:
    """0 if all is done, UNFINISHED if not, 1 if no rollout is `ok`; a part of a run need not have one that is."""
    if result.unfinished:
        return UNFINISHED
    return 0 if is_part or result.status.get("ok") else 1


def print_table(result: "RunResult", stored: int | None) -> None:
    """Prints the result; `stored` is the number of the round's calls that the policy server recorded, None if unknown."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    reward = (
        "none"
        if result.mean_reward is None
        else f"{result.mean_reward:.3f} over {result.rewarded} of {result.total} rollouts"
    )
    rows = {
        "run": result.run_id,
        "round": str(result.round),
        "rollouts": ", ".join(f"{count} {status}" for status, count in result.status.items()),
        "mean reward": reward,
        "model calls": _calls(result.calls, stored),
        "seconds": f"{result.seconds:.1f}",
    }
    if "requests" in result.judge:
        rows["judge model"] = _judge_model(result.judge)
    if "position_bias" in result.judge:
        rows["position bias"] = _position_bias(result.judge)
    if repeated := result.unfinished - result.unacknowledged:
        rows["not finished"] = f"{repeated} rollouts; --run {result.run_id} --resume repeats them"
    if result.unacknowledged:
        rows["not acknowledged"] = f"{result.unacknowledged} verdicts; --run {result.run_id} --resume sends them"
    if result.resumed:
        rows["finished before"] = str(result.resumed)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _judge_model(figures: Mapping[str, float]) -> str:
    requests, cached, read, written = (
        f"{figures[name]:,.0f}" for name in ("requests", "cached", "prompt_tokens", "completion_tokens")
    )
    return f"{requests} requests, {cached} verdicts from the cache, {read} tokens read, {written} written"


def _position_bias(figures: Mapping[str, float]) -> str:
    error = f" ± {figures['position_bias_error']:.3f}" if "position_bias_error" in figures else ""
    groups = f"{figures['both_orders']:.0f} group{'' if figures['both_orders'] == 1 else 's'} in both orders"
    return f"{figures['position_bias']:+.3f}{error} of 1 for standing earlier, over {groups}"


def _calls(counted: int, stored: int | None) -> str:
    if stored is None:
        return f"{counted}, as counted by the agents' processes"
    if stored == counted:
        return str(stored)
    return f"{stored} recorded by the policy server, {counted} counted by the agents' processes"

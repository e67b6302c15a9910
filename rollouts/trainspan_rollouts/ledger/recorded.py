"""What the ledgers of a run say about it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from trainspan_rollouts.ledger.lines import Begin, End, Finished, head_of, lines_of, note_waiting
from trainspan_rollouts.ledger.paths import ledger_files, round_of
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry.identity import Split

__all__ = [
    "RecordedAgent",
    "recorded_agent",
    "recorded_rewards",
    "recorded_rollouts",
    "statuses",
    "task_outcomes",
    "waiting_rounds",
]


@dataclass(frozen=True, slots=True)
class RecordedAgent:
    """What a run's rollouts execute."""

    target: tuple[str, ...]
    harness: str | None = None
    workspace: str | None = None


def recorded_agent(run_id: str, round_: int, split: Split | None) -> tuple[str, RecordedAgent] | None:
    """Returns task file (`-`: standard input) and agent of a run's rollouts of a round; None if they are not recorded."""
    for file in (*ledger_files(run_id, round_, split), *ledger_files(run_id, round_, None)):
        with file.open("rb") as lines:
            head = head_of(file, lines.readline())
        if head is None:
            return None
        return head["tasks"], RecordedAgent(tuple(head["target"]), head.get("harness"), head.get("workspace"))
    return None


def waiting_rounds(run_id: str, split: Split | None) -> list[int]:
    """Returns the rounds of a run and split whose ledgers have spans that the collector has not acknowledged."""
    rounds = set()
    for file in ledger_files(run_id, None, split):
        waiting: dict[tuple[str, int], JsonObject] = {}
        for line in lines_of(file):
            note_waiting(waiting, line)
        if waiting:
            rounds.add(round_of(file))
    return sorted(rounds)


def recorded_rollouts(run_id: str, split: Split | None) -> set[str]:
    """Returns the ids of the rollouts of a run and split that have begun."""
    files = ledger_files(run_id, None, split)
    return {line.rollout_id for file in files for line in lines_of(file) if isinstance(line, Begin)}


def recorded_rewards(file: Path) -> dict[tuple[str, int], float]:
    """Returns (rollout id, attempt) → reward for the finished, rewarded rollouts in a ledger; empty without a file."""
    begun: dict[str, tuple[str, int]] = {}
    rewards: dict[tuple[str, int], float] = {}
    for line in lines_of(file):
        if isinstance(line, Begin):
            begun[line.key] = line.rollout_id, line.attempt
        elif isinstance(line, End) and line.outcome.reward is not None and line.key in begun:
            rewards[begun[line.key]] = line.outcome.reward
    return rewards


def task_outcomes(file: Path) -> dict[str, list[Finished]]:
    """Returns task id → outcomes of its finished rollouts in a ledger, of each the last attempt's; empty without a file."""
    last: dict[str, Finished] = {}
    for line in lines_of(file):
        if isinstance(line, Begin):
            last.pop(line.key, None)  # another attempt
        elif isinstance(line, End):
            last[line.key] = line.outcome
    outcomes: dict[str, list[Finished]] = {}
    for key, outcome in last.items():
        _, _, task_id = key.partition(":")
        outcomes.setdefault(task_id, []).append(outcome)
    return outcomes


def statuses(file: Path) -> tuple[int, Counter[str], list[float]]:
    """Returns the number of rollouts that have begun, final status → finished rollouts, and the rewards of these."""
    begun: set[str] = set()
    ended: dict[str, Finished] = {}
    for line in lines_of(file):
        if isinstance(line, Begin):
            begun.add(line.key)
            ended.pop(line.key, None)  # another attempt
        elif isinstance(line, End):
            ended[line.key] = line.outcome
    rewards = [outcome.reward for outcome in ended.values() if outcome.reward is not None]
    return len(begun), Counter(outcome.status for outcome in ended.values()), rewards

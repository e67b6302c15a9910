"""Which rollouts belong together."""

import random
import time

import polars as pl
import pytest

from trainspan_processing.read import inventory


def related(pairs: list[tuple[str, str]]) -> dict[str, str]:
    holdings = pl.DataFrame(pairs, schema=["rollout_id", "trace_id"], orient="row")
    return dict(inventory._related(holdings).select("rollout_id", "relation").iter_rows())


def by_hand(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Sets of rollouts, joined trace by trace."""
    sets = {rollout: {rollout} for rollout, _ in pairs}
    for trace in {trace for _, trace in pairs}:
        joined = set().union(*(sets[rollout] for rollout, of in pairs if of == trace))
        sets |= dict.fromkeys(joined, joined)
    return {rollout: min(one) for rollout, one in sets.items()}


@pytest.mark.parametrize("seed", range(20))
def test_rollouts_that_share_traces_belong_together_directly_or_not(seed: int) -> None:
    dice = random.Random(seed)
    n = dice.randint(2, 30)
    pairs = [(f"r{dice.randrange(n):02}", f"t{dice.randrange(n)}") for _ in range(dice.randint(1, 50))]
    assert related(pairs) == by_hand(pairs)


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_long_chain_of_shared_traces_takes_few_passes(is_shuffled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any agent can send one; a pass for each link would take hours."""
    n = 20_000
    numbers = list(range(n))
    if is_shuffled:
        random.Random(0).shuffle(numbers)
    pairs = [(f"r{numbers[place]:05}", f"t{place + more}") for place in range(n) for more in (0, 1)]
    passes, ends = [], inventory._ends
    monkeypatch.setattr(inventory, "_ends", lambda steps: passes.append(time.monotonic()) or ends(steps))
    assert set(related(pairs).values()) == {"r00000"}
    assert len(passes) < 20

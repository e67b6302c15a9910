"""The bounds of the registry, and how calls are matched."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspan_schemas.telemetry.prefix import Branched, ForcedCall, ForcedChoice, ForcedPrefix, prompt_digest
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs
from trainspan_serving.forcing.branch import Branch
from trainspan_serving.forcing.divergence import DivergedError
from trainspan_serving.forcing.registry import BranchRegistry, RegistryError


def call(index: int, prompt: list[int], *answers: list[int]) -> ForcedCall:
    choices = (ForcedChoice(encode_ids(ids), encode_logprobs([-1.0] * len(ids)), "stop") for ids in answers)
    return ForcedCall(index, encode_ids(prompt), tuple(choices), 4)


def prefix(*calls: ForcedCall, rollout: str = "r", later: tuple[ForcedCall, ...] = ()) -> ForcedPrefix:
    digests = tuple(prompt_digest(it.prompt) for it in later)
    point = later[0].prompt if later else b""
    return ForcedPrefix(rollout, 0, f"trace of {rollout}", calls, digests, point, 60.0)


def params(n: int = 1, **asked: Any) -> Any:
    return SimpleNamespace(**{"n": n, "logprobs": 0, "prompt_logprobs": None, **asked})


def branch_of(made: ForcedPrefix) -> Branch:
    return Branch(made, lambda ids: "".join(f"<{token}>" for token in ids))


def answered(branch: Branch, prompt: list[int], n: int = 1) -> list[bytes] | None:
    found = branch.next_answer(prompt, params(n))
    return None if found is None else [choice.ids for choice in found.choices]


def test_choices_of_equal_prompts_are_given_in_their_order_also_if_they_are_asked_for_one_by_one() -> None:
    branch = branch_of(prefix(call(0, [1], [10], [11]), call(1, [1], [12]), call(2, [2], [13])))
    assert answered(branch, [1]) == [encode_ids([10])]
    assert answered(branch, [2]) == [encode_ids([13])]
    assert answered(branch, [1]) == [encode_ids([11])]
    assert answered(branch, [1]) == [encode_ids([12])]
    assert answered(branch, [1]) is None
    assert branch.outcome() == Branched(4, 0, 1, None)


def test_the_first_token_that_differs_is_named_in_the_most_similar_call() -> None:
    branch = branch_of(prefix(call(0, [1, 2, 3], [10]), call(1, [1, 2, 4, 5], [11])))
    with pytest.raises(
        DivergedError, match=r"call 1: .* at token 3 of 4: the end instead of 5 \('<5>'\), after '<1><2><4>'$"
    ):
        branch.next_answer([1, 2, 4], params())
    with pytest.raises(DivergedError, match="call 1"):
        branch.next_answer([1, 2, 3], params())
    assert branch.outcome().missing == 2


def test_the_prompt_at_which_a_branch_begins_must_be_the_stored_one() -> None:
    """Else the branch samples in another state: a clock that shows in this prompt only would go unnoticed."""
    stored = prefix(call(0, [1], [10]), later=(call(1, [1, 10, 50], [11]), call(2, [1, 10, 50, 11], [12])))
    branch = branch_of(stored)
    assert answered(branch, [1]) == [encode_ids([10])]
    with pytest.raises(
        DivergedError, match=r"call 1: the prompt differs .* at token 2 of 3: 99 \('<99>'\) instead of 50"
    ):
        branch.next_answer([1, 10, 99], params())
    assert branch.outcome().sampled == 0
    branch = branch_of(stored)
    branch.next_answer([1], params())
    assert answered(branch, [1, 10, 50]) is None
    assert answered(branch, [1, 10, 50, 77]) is None  # it follows from the new answer


def test_branches_of_a_seeded_agent_have_seeds_of_their_own() -> None:
    seeds = {branch_of(prefix(call(0, [1], [2]), rollout=name)).own_seed(7) for name in "abc"}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert branch_of(prefix(call(0, [1], [2]), rollout="a")).own_seed(7) in seeds


def test_a_branch_from_the_first_call_repeats_nothing_but_begins_in_the_stored_state() -> None:
    stored = prefix(later=(call(0, [1, 2], [10]), call(1, [1, 2, 10, 3], [11])))
    assert ForcedPrefix.from_json(stored.to_json()) == stored
    branch = branch_of(stored)
    with pytest.raises(DivergedError, match=r"call 0: the prompt differs .* at token 1 of 2: 9 "):
        branch.next_answer([1, 9], params())
    branch = branch_of(stored)
    assert answered(branch, [1, 2]) is None
    assert branch.outcome() == Branched(0, 0, 1, None)


def test_a_branch_begins_early_if_parallel_agents_reach_a_later_call_first() -> None:
    later = call(1, [2], [11])
    branch = branch_of(prefix(call(0, [1], [10]), later=(later,)))
    assert answered(branch, [2]) is None
    assert answered(branch, [2, 7, 8]) is None  # it follows from the new answer
    assert answered(branch, [1]) == [encode_ids([10])]
    assert branch.outcome() == Branched(1, 0, 2, None)


@given(st.data())
def test_every_order_of_the_stored_calls_gets_every_stored_answer_once(data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), min_size=1, max_size=6))
    calls = [call(index, prompt, [100 + index]) for index, prompt in enumerate(prompts)]
    branch = branch_of(prefix(*calls))
    order = data.draw(st.permutations(range(len(calls))))
    given_ = [(prompts[place], answered(branch, prompts[place])) for place in order]
    for prompt in prompts:
        stored = [[choice.ids for choice in it.choices] for it in calls if it.prompt == encode_ids(prompt)]
        assert [ids for asked, ids in given_ if asked == prompt] == stored
    assert branch.outcome() == Branched(len(calls), 0, 0, None)


def registry(max_bytes: int = 1000, now: list[float] | None = None) -> BranchRegistry:
    clock = now or [0.0]
    return BranchRegistry(256, max_bytes, str, clock=lambda: clock[0])


def test_memory_is_bounded_and_freed() -> None:
    branches = registry(max_bytes=100)
    made = prefix(call(0, [1] * 10, [1, 2]))  # 40 + 8 + 8 bytes
    branches.register(made)
    with pytest.raises(RegistryError, match="1 prefixes with 56 bytes are registered; there is no room") as full:
        branches.register(dataclasses.replace(made, rollout_id="s", trace_id="t"))
    assert full.value.status == 503
    with pytest.raises(RegistryError, match="a prefix of 168 bytes exceeds") as large:
        branches.register(prefix(call(0, [1] * 38, [1, 2]), rollout="large"))
    assert large.value.status == 413
    branches.end_branch("r", 0)
    branches.register(dataclasses.replace(made, rollout_id="s", trace_id="t"))
    assert len(branches) == 1


def test_the_number_of_prefixes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspan_serving.forcing.registry._MAX_BRANCHES", 2)
    branches = registry()
    for name in "ab":
        branches.register(prefix(call(0, [1], [2]), rollout=name))
    with pytest.raises(RegistryError, match="no room"):
        branches.register(prefix(call(0, [1], [2]), rollout="c"))


def test_what_has_expired_is_neither_found_nor_counted() -> None:
    now = [0.0]
    branches = registry(now=now)
    branches.register(prefix(call(0, [1], [2])))
    assert branches.find(("r", 0), None) is branches.find(None, "trace of r") is not None
    assert branches.find(("s", 0), "trace of r") is None
    now[0] = 60.0
    assert branches.find(("r", 0), None) is None
    with pytest.raises(RegistryError, match="has no prefix here"):
        branches.end_branch("r", 0)
    assert len(branches) == 0

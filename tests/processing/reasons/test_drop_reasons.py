"""Every call becomes a row or is dropped for exactly one reason."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import TestRollout, chain
from trainspan_processing.read.source import Source
from trainspan_processing.reasons.advice import ADVICE
from trainspan_processing.reasons.drop_reasons import rollout_reason
from trainspan_schemas.artifacts.dataset import COLUMNS, manifest_path
from trainspan_schemas.errors import DatasetError, UsageError
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.constraints import Constraint, Grammar
from trainspan_schemas.telemetry.status import DROP_REASONS

pytestmark = pytest.mark.ci


def _of(library: str, kind: str) -> Constraint:
    return Constraint(Grammar(kind, kind, "[0-9]", library, "1", 320, (2,), True))


def _constrained(constraint: Constraint, **more: Any) -> dict[str, Any]:
    return {"trainspan.sampling.constrained": True, "trainspan.sampling.constraint": constraint.to_json(), **more}


_CALLS: dict[str, list[dict[str, Any]]] = {
    "incomplete": [{"gen_ai.response.finish_reasons": None}, {"gen_ai.response.finish_reasons": ["abort"]}],
    "ended_by_server": [
        {"gen_ai.response.finish_reasons": ["ended_by_server"], "trainspan.call.delivered": False},
    ],
    "not_delivered": [{"trainspan.call.delivered": False}],
    "attributes_dropped": [{"dropped_attributes": 1}],
    "forced": [{"trainspan.call.forced": True}],
    "multimodal": [{"trainspan.call.multimodal": True}],
    "constrained": [
        {"trainspan.sampling.constrained": True},
        {"trainspan.sampling.constrained": True, "trainspan.sampling.constraint": "no record"},
    ],
    "constrained:guidance_regex": [_constrained(_of("guidance", "regex"))],
    "constrained:beam_search": [_constrained(Constraint(others=("beam_search", "min_tokens")))],
    "constrained:raw_logprobs": [
        {**_constrained(Constraint(allowed_ids=(3, 4))), "trainspan.logprobs.mode": "raw"},
    ],
    "greedy": [{"gen_ai.request.temperature": 0.0}, {"gen_ai.request.temperature": 0}],
    "sampling_truncated": [
        {"gen_ai.request.top_p": 0.9},
        {"gen_ai.request.top_k": 40},
        {"gen_ai.request.min_p": 0.05},
        {"gen_ai.request.frequency_penalty": 0.1},
        {"gen_ai.request.presence_penalty": -0.1},
        {"gen_ai.request.repetition_penalty": 1.1},
    ],
    "unstated_sampling": [
        {"trainspan.logprobs.mode": None, "gen_ai.request.temperature": None},
        {"trainspan.logprobs.mode": None, "gen_ai.request.top_p": None},
        {"trainspan.logprobs.mode": None},  # whether it was constrained
    ],
    "no_token_ids": [{"trainspan.completion.token_ids": b"", "trainspan.completion.logprobs": b""}],
    "invalid_logprobs": [
        {"logprobs": [-1.0, float("nan")]},
        {"logprobs": [-1.0, float("-inf")]},
    ],
    "no_logprobs": [
        {"logprobs": [-1.0]},
        {"trainspan.completion.logprobs": None},
        {"trainspan.logprobs.mode": "raw", "gen_ai.request.temperature": 0.7},
        {
            "trainspan.logprobs.mode": None,
            "trainspan.sampling.constrained": False,
            "gen_ai.request.temperature": 0.7,
        },
    ],
    "mixed_versions": [
        {"trainspan.policy.version_spans": "[[0, 0, 1], [1, 1, 3]]"},
        {"trainspan.policy.version_spans": "[[0, 0, 1], [1, 0, 2]]"},
        {"trainspan.policy.version_spans": "unknown"},
    ],
    "too_long": [{"prompt": list(range(2, 60))}],
    "stale": [{"version": 0}],
    "no_boundary": [{"trainspan.no_boundary": True}],
}
_SOUND: list[dict[str, Any]] = [
    {},
    {"gen_ai.response.finish_reasons": ["length"]},
    {"gen_ai.request.temperature": 0.7},
    {"trainspan.logprobs.mode": "raw"},
    {"trainspan.call.delivered": None},
    {"trainspan.policy.version_spans": "[[4, 0, 1], [5, 1, 2]]"},
    {"gen_ai.request.top_k": -1},
    {"gen_ai.request.temperature": None, "gen_ai.request.top_p": None},
    {"trainspan.logprobs.mode": None, "trainspan.sampling.constrained": False},
    _constrained(_of("xgrammar", "regex")),
    _constrained(Constraint(biases=((3, 1.0),))),
]


def _call(rollout: TestRollout, index: int, change: dict[str, Any]) -> None:
    change = {"version": 5, **change}
    prompt, version = change.pop("prompt", [1, index + 2]), change.pop("version")
    rollout.call(index, prompt, [3, 4], version=version, **change)


def test_an_unsound_call_is_dropped_by_name_and_leaves_its_rollout(bench: Bench) -> None:
    rollouts = []
    for reason, changes in _CALLS.items():
        for reward in (1.0, 0.0):
            rollout = bench.rollout(f"{reason}-{reward}", task=reason).reward(reward)
            for index, change in enumerate([{}, *changes]):
                _call(rollout, index, change)
            rollouts.append(rollout)
    bench.send(*rollouts)
    built = bench.build(round_=0, max_staleness=4, max_tokens=50, min_coverage=0.0)
    assert built.manifest["dropped"] == {reason: 2 * len(changes) for reason, changes in _CALLS.items()}
    kept = rows(built).select("task_id", "call_index").sort("task_id").rows()
    assert kept == [(reason, 0) for reason in sorted(_CALLS) for _ in range(2)]


def test_constrained_calls_are_kept_with_what_constrained_them_each_text_once(bench: Bench) -> None:
    long = Constraint(Grammar("regex", "regex", "[0-9]" * 2000, "xgrammar", "1", 320, (2,), True))
    changes: list[dict[str, Any]] = [
        {},
        _constrained(_of("xgrammar", "regex")),
        *[_constrained(long, **{"trainspan.sampling.constraint_start": 1})] * 30,
    ]
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name).reward(reward)
        for index, change in enumerate(changes):
            _call(rollout, index, dict(change))
        bench.send(rollout)
    built = bench.build(round_=0)
    assert built.manifest["dropped"] == {}
    texts = [None, _of("xgrammar", "regex").to_json(), *[long.to_json()] * 30]
    assert rows(built)["constraint"].to_list() == texts * 2
    assert rows(built)["constraint_start"].to_list() == [None, None, *[1] * 30] * 2
    (part,) = built.path.iterdir()
    column = pq.ParquetFile(part).metadata.row_group(0).column([*COLUMNS].index("constraint"))
    assert column.total_uncompressed_size < 2 * len(long.to_json())


def test_calls_that_do_not_state_their_sampling_are_trained_once_the_user_admits_them(bench: Bench) -> None:
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name).reward(reward)
        for index, change in enumerate([{}, *_CALLS["unstated_sampling"], {"gen_ai.request.top_p": 0.9}]):
            _call(rollout, index, change)
        bench.send(rollout)
    built = bench.build(round_=0, admit="unstated_sampling")
    assert built.manifest["dropped"] == {"sampling_truncated": 2}
    assert set(rows(built)["temperature"]) == {1.0}
    with pytest.raises(
        UsageError,
        match="admit = 'greedy' is not admissible: use one of unsigned, title, unstated_sampling, untrusted, untrusted_reward",
    ):
        bench.build(round_=0, out=bench.out / "other", admit="greedy")


_STATED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (_STATED, None),
        ({**_STATED, "tool_choice": "auto", "response_format": {"type": "text"}}, None),
        ({**_STATED, "tool_choice": "required"}, "constrained"),
        ({**_STATED, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "constrained"),
        ({**_STATED, "response_format": {"type": "json_object"}}, "constrained"),
        ({**_STATED, "extra_body": {"guided_regex": "[0-9]"}}, "constrained"),
        ({**_STATED, "top_p": 0.5}, "sampling_truncated"),
        ({**_STATED, "temperature": 0}, "greedy"),
        *(
            ({name: value for name, value in _STATED.items() if name != unstated}, "unstated_sampling")
            for unstated in _STATED
        ),
        ({**_STATED, "top_k": 20}, "sampling_truncated"),
        ({"temperature": 1.0, "top_p": 1.0, "extra_body": {"top_k": -1, "min_p": 0, "repetition_penalty": 1}}, None),
        (None, "unstated_sampling"),
        ("no JSON", "unstated_sampling"),
    ],
)
def test_tokens_of_a_clients_span_are_trained_if_its_request_states_how_they_were_sampled(
    bench: Bench, request_: Any, reason: str | None
) -> None:
    answer = {
        "id": "chatcmpl-1",
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "token_ids": [3, 4],
                "logprobs": {"content": [{"token": "x", "logprob": -0.5}, {"token": "y", "logprob": -1.0}]},
            }
        ],
    }
    stated = (
        {}
        if request_ is None
        else {"llm.invocation_parameters": request_ if isinstance(request_, str) else json.dumps(request_)}
    )
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name).reward(reward)
        span = {"openinference.span.kind": "LLM", "llm.model_name": "policy"}
        rollout.span("client", 1.0, 2.0, **span, **{"output.value": json.dumps({**answer, "id": name})}, **stated)
        bench.send(rollout)
    built = bench.build(round_=0, min_coverage=0.0) if reason is None else None
    if built is not None:
        assert built.manifest["dropped"] == {}
        assert rows(built)["tokens_source"].to_list() == ["response"] * 2
    else:
        with pytest.raises(DatasetError, match=rf"none of 2 calls .* most excluded by {reason} \(2\)"):
            bench.build(round_=0, min_coverage=0.0)


def test_sound_calls_are_all_kept(bench: Bench) -> None:
    for name, reward in (("a", 1.0), ("b", 0.0)):
        rollout = bench.rollout(name).reward(reward)
        for index, change in enumerate(_SOUND):
            _call(rollout, index, change)
        bench.send(rollout)
    built = bench.build(round_=0, max_staleness=4)
    assert built.manifest["dropped"] == {}
    assert rows(built)["policy_version_spans"].drop_nulls().to_list() == ["[[4, 0, 1], [5, 1, 2]]"] * 2


def test_a_failed_rollout_is_dropped_by_its_status_and_does_not_count_as_reward_zero(bench: Bench) -> None:
    statuses = ("agent_error", "timeout", "cancelled", "infra_error", "judge_error", "diverged")
    bench.send(
        chain(bench.rollout("a"), 1).reward(1.0),
        chain(bench.rollout("b"), 1).reward(0.5),
        *(chain(bench.rollout(status, status=status), 2) for status in statuses),
    )
    built = bench.build(round_=0, min_coverage=0.0)
    assert built.manifest["dropped"] == dict.fromkeys(statuses, 2)
    assert built.manifest["dropped_rollouts"] == dict.fromkeys(statuses, 1)
    assert built.manifest["rewards"]["mean"] == 0.75


def test_a_rollout_without_reward_is_dropped_as_such(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(reward) for name, reward in (("a", 1.0), ("b", 0.0))))
    bench.send(chain(bench.rollout("c"), 1))
    assert bench.build(round_=0).manifest["dropped"] == {"no_reward": 1}


def test_validation_is_never_trained_and_does_not_lower_the_coverage(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(reward) for name, reward in (("a", 1.0), ("b", 0.0))))
    bench.send(*(chain(bench.rollout(f"v{number}", split="val"), 1).reward(1.0) for number in range(9)))
    built = bench.build(round_=0)
    assert built.manifest["dropped"] == {"validation": 9}
    assert built.manifest["coverage"] == 1.0
    assert built.manifest["rewards"]["n"] == 2


def test_groups_without_contrast_are_dropped_by_name_unless_they_are_kept_with_advantage_zero(bench: Bench) -> None:
    for task, rewards in {"same": [1.0, 1.0], "alone": [0.3], "mixed": [0.0, 1.0]}.items():
        bench.send(
            *(
                chain(bench.rollout(f"{task}{number}", task=task), 1).reward(reward)
                for number, reward in enumerate(rewards)
            )
        )
    built = bench.build(round_=0)
    assert built.manifest["dropped"] == {"zero_spread_group": 2, "singleton_group": 1}
    assert (built.manifest["groups_seen"], built.manifest["groups"]) == (3, 1)
    assert built.manifest["rewards"]["n"] == 5
    every = bench.build(round_=0, out=bench.out / "all", keep_zero_spread=True)
    assert every.manifest["dropped"] == {"singleton_group": 1}
    kept = rows(every)
    assert kept.filter(kept["task_id"] == "same")["advantage"].to_list() == [0.0, 0.0]


def test_a_round_in_which_nothing_differs_is_a_dataset_without_rows(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 2).reward(1.0) for name in "ab"))
    built = bench.build(round_=0)
    assert (built.manifest["rows"], built.manifest["dropped"]) == (0, {"zero_spread_group": 4})
    assert rows(built).height == 0
    with pytest.raises(DatasetError, match=r"none of 4 calls .* zero_spread_group"):
        bench.build(out=bench.out / "next")


def test_too_few_trainable_calls_fail_with_the_reason_that_excluded_most(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(reward) for name, reward in (("a", 1.0), ("b", 0.0))))
    bench.send(chain(bench.rollout("c", status="timeout"), 2), chain(bench.rollout("d", status="agent_error"), 1))
    with pytest.raises(DatasetError, match=r"only 40% .* excluded by timeout \(2\): .* timeout_s"):
        bench.build(round_=0)
    assert not bench.out.exists() or not list(bench.out.iterdir())
    assert bench.build(round_=0, min_coverage=0.4).manifest["coverage"] == 0.4


def test_calls_that_are_deleted_during_the_build_are_dropped_as_such(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, deleted = (f"{bench.run_id}-{name}" for name in ("kept", "deleted"))
    for task in (kept, deleted):
        bench.send(*(chain(bench.rollout(f"{task}-{n}", task=task), 2).reward(n) for n in (0.0, 1.0)))
    command = [sys.executable, "-m", "trainspan_cli", "store", "purge", "--yes", "--task", deleted]
    read = Source.tokens

    def tokens(self: Source, *asked: Any) -> Iterator[pl.DataFrame]:
        store = str(bench.collectors[0].store)
        subprocess.run([*command, "--store", store], check=True, stdout=subprocess.DEVNULL)
        yield from read(self, *asked)

    monkeypatch.setattr(Source, "tokens", tokens)
    built = bench.build(round_=0, min_coverage=0.0)
    assert built.manifest["dropped"] == {"deleted": 4}
    assert set(rows(built)["task_id"]) == {kept}


def test_the_first_reason_of_the_documented_order_is_the_one(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(reward) for name, reward in (("a", 1.0), ("b", 0.0))))
    rollout = bench.rollout("c", split="val", status="timeout")
    _call(rollout, 0, {"gen_ai.request.temperature": 0.0, "gen_ai.request.top_p": 0.5})
    other = bench.rollout("d").reward(0.0)
    _call(other, 0, {"gen_ai.request.temperature": 0.0, "gen_ai.request.top_p": 0.5, "logprobs": [-1.0]})
    bench.send(rollout, other)
    assert bench.build(round_=0).manifest["dropped"] == {"greedy": 1, "validation": 1}


@pytest.mark.parametrize("score", [True, False, "1.0", "good", float("nan"), float("inf"), float("-inf"), None])
def test_a_reward_whose_score_is_no_finite_number_is_named(bench: Bench, score: Any) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(reward) for name, reward in (("a", 1.0), ("b", 0.0))))
    given = {keys.EVALUATION_NAME: "reward"} | ({} if score is None else {keys.EVALUATION_SCORE: score})
    invalid, both, judged = bench.rollout("c"), bench.rollout("d"), bench.rollout("e", judge="exact")
    judged.reward(0.25, **{keys.EVALUATION_SOURCE: "judge"})
    for rollout in (invalid, both.reward(0.5), judged):
        chain(rollout, 1).root_span.events.append((rollout.begins + 99.0, given))
    bench.send(invalid, both, judged)
    built = bench.build(round_=0)
    # The sum of .5 and a score that is no number is unknown; beside a judge's verdict an agent's own score does not count.
    assert built.manifest["dropped"] == {"invalid_reward": 2}
    assert built.manifest["dropped_rollouts"] == {"invalid_reward": 2}
    assert sorted(rows(built)["return"].to_list()) == [0.0, 0.25, 1.0]


def test_a_top_k_of_more_tokens_than_any_vocabulary_has_truncates_nothing(bench: Bench) -> None:
    """As a client records it that asks for all tokens; the policy server knows its vocabulary, and records 0."""
    for name, top_k, reward in (("a", 2**31 - 1, 1.0), ("b", 1 << 20, 0.0), ("c", 200_000, 0.0), ("d", -1, 0.5)):
        rollout = bench.rollout(name).reward(reward)
        rollout.call(0, [1], [2], gen_ai__request__top_k=top_k)
        bench.send(rollout)
    built = bench.build(round_=0)
    assert built.manifest["dropped"] == {"sampling_truncated": 1}
    assert sorted(rows(built)["return"].to_list()) == [0.0, 0.5, 1.0]


def test_there_is_advice_for_every_reason() -> None:
    assert set(ADVICE) == set(DROP_REASONS)


def test_the_manifest_is_strict_json(bench: Bench) -> None:
    bench.send(*(chain(bench.rollout(name), 1).reward(reward) for name, reward in (("a", 1.0), ("b", 0.0))))
    text = manifest_path(bench.build(round_=0).path).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["calls_seen"] == 2


def test_records_with_an_agents_token_are_untrusted_if_others_are_required() -> None:
    """Tested on frames: a collector that requires tokens is tested in `test_untrusted`."""
    rollouts = pl.DataFrame(
        {
            "status": ["ok"] * 3,
            "split": ["train"] * 3,
            "selected": [True] * 3,
            "superseded": [False] * 3,
            "complete": [True] * 3,
            "reward_failed": [False] * 3,
            "reward_outside": [False] * 3,
            "reward_untrusted": [True, True, False],
            "reward_invalid": [True, False, False],
            **{key: [False] * 3 for key in ("collides", "conflicts", "reward_unclear")},
            "teaches": [True] * 3,
            "reward": [None, 1.0, None],
        }
    )
    assert rollouts.select(rollout_reason()).to_series().to_list() == ["untrusted_reward", None, "no_reward"]

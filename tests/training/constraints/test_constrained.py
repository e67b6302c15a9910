"""Constrained calls are trained under the masks they were sampled under; if replay fails, they are dropped by name."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar

from tests.support.dataset_files import LoggedCall, write_dataset
from tests.training.devices.test_team import tensors, train
from tests.training.support.exactness.references import Measured, as_calls, assert_same, gradients, observation_loss
from tests.training.support.processes.pair import FSDP
from tests.training.support.sessions import Run
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.telemetry.constraints import Constraint, Grammar
from trainspan_training.constraints.replay import Replay, Replayer, serialized_tokenizer
from trainspan_training.data.dataset import ConstrainedCall
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.loss_weights import find_rule
from trainspan_training.data.sequences import ChatTurns, make_sequences
from trainspan_training.data.steps import plan_steps
from trainspan_training.metrics import round_record as metrics
from trainspan_training.model.loading import load_tokenizer

SIZE, STOP = 293, 2
SCHEMA = '{"type":"object","properties":{"a":{"enum":["left","right"]},"n":{"type":"integer","maximum":99}},"required":["a","n"]}'
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["a"],
            "tags": [{"begin": "a{", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": "}"}],
        },
    }
)


def grammar(kind: str, form: str, spec: str, **changes: Any) -> Constraint:
    made = Grammar(kind, form, spec, "xgrammar", version("xgrammar"), SIZE, (STOP,), True)
    return Constraint(dataclasses.replace(made, **changes))


KINDS: dict[str, Constraint] = {
    "json_schema": grammar("json_schema", "json_schema", SCHEMA),
    "compact json": grammar("json_schema", "json_schema", SCHEMA, any_whitespace=False),
    "structural_tag": grammar("structural_tag", "structural_tag", TAG),
    "regex": grammar("regex", "regex", "[0-9]{2,4}(ab|cd)*x"),
    "choice": grammar("choice", "ebnf", 'root ::= "yes" | "no" | "yes and no"'),
    "grammar": grammar("grammar", "ebnf", 'root ::= "a" [b-f]+ rest\nrest ::= "z" | "y" rest'),
    "lark": grammar("grammar", "lark", 'start: "a" INT\nINT: /[0-9]+/\n'),
    "allowed_token_ids": Constraint(allowed_ids=(2, 40, 41, 42, 90)),
    "logit_bias": Constraint(biases=((2, 1.5), (40, 4.0), (41, -100.0))),
    "bad_words": Constraint(bad_words=((40,), (41, 42), (5, 6, 7))),
}
KINDS["all"] = dataclasses.replace(
    KINDS["regex"], allowed_ids=(2, *range(15, 110)), biases=((20, 2.0), (21, -3.0)), bad_words=((19,), (20, 21))
)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return load_tokenizer(model_dir)


@pytest.fixture(scope="module")
def replayer(tokenizer: Any) -> Iterator[Replayer]:
    replayer = Replayer(SIZE, lambda: serialized_tokenizer(tokenizer, SIZE))
    yield replayer
    replayer.close()


class Dense:
    """The masks (V,) and biases (V,) of a constraint along a completion, computed naively."""

    def __init__(self, constraint: Constraint, tokenizer: Any) -> None:
        self._constraint = constraint
        self._matcher = None
        if of := constraint.grammar:
            compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=SIZE))
            if of.form == "json_schema":
                separators = None if of.any_whitespace else (",", ":")
                made = compiler.compile_json_schema(of.spec, any_whitespace=of.any_whitespace, separators=separators)
            else:
                compilers = {"structural_tag": "structural_tag", "regex": "regex", "ebnf": "grammar", "lark": "lark"}
                made = getattr(compiler, f"compile_{compilers[of.form]}")(of.spec)
            self._matcher = xgrammar.GrammarMatcher(made, override_stop_tokens=[STOP])
        self._past: list[int] = []
        self.biases = torch.zeros(SIZE, dtype=torch.float64)
        for token, bias in constraint.biases:
            self.biases[token] = bias

    def mask(self) -> torch.Tensor:
        allowed = torch.ones(SIZE, dtype=torch.bool)
        if self._matcher:
            bits = xgrammar.allocate_token_bitmask(1, SIZE)
            self._matcher.fill_next_token_bitmask(bits)
            words = [int(word) & 0xFFFFFFFF for word in bits[0]]
            allowed &= torch.tensor([bool(words[token // 32] >> (token % 32) & 1) for token in range(SIZE)])
        if (ids := self._constraint.allowed_ids) is not None:
            allowed &= torch.isin(torch.arange(SIZE), torch.tensor(ids))
        for *before, last in self._constraint.bad_words:
            if self._past[len(self._past) - len(before) :] == before:
                allowed[last] = False
        return allowed

    def take(self, token: int) -> None:
        self._past.append(token)
        if self._matcher:
            assert self._matcher.accept_token(token)


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A call and its dense masks and biases (C, V)."""

    call: LoggedCall
    masks: torch.Tensor
    biases: torch.Tensor


def sampled(constraint: Constraint, tokenizer: Any, model: Any, seed: int, **fields: Any) -> Sampled:
    """Samples randomly from the allowed tokens, fewer than 24."""
    rng = np.random.default_rng(seed)
    dense, ids, masks = Dense(constraint, tokenizer), [], []
    while len(ids) < 24 and (not ids or ids[-1] != STOP):
        masks.append(dense.mask())
        choices = masks[-1].nonzero()[:, 0].tolist()
        printable = [token for token in choices if token == STOP or len(tokenizer.decode([token]).strip()) > 0]
        ids.append(int(rng.choice(printable or choices)))
        if ids[-1] != STOP:
            dense.take(ids[-1])
    prompt = fields.pop("prompt", None) or rng.integers(3, SIZE, 9).tolist()
    call = LoggedCall(f"rollout-{seed}", prompt, ids, [], float(rng.normal()), temperature=0.8, **fields)
    made = Sampled(dataclasses.replace(call, constraint=constraint.to_json()), torch.stack(masks), dense.biases)
    with torch.no_grad():
        exact = logprobs(model, made)
    noisy = exact + torch.from_numpy(rng.normal(0, 0.3, len(ids))) * (made.masks.sum(dim=1) > 1)
    return dataclasses.replace(made, call=dataclasses.replace(made.call, logprobs=noisy.float().tolist()))


def logprobs(model: Any, of: Sampled) -> torch.Tensor:
    """(C,) of a dense softmax over the allowed tokens, in the model's dtype."""
    call = of.call
    logits = model(input_ids=torch.tensor([call.prompt_ids + call.completion_ids])).logits[
        0, len(call.prompt_ids) - 1 : -1
    ]
    scaled = ((logits + of.biases) / call.temperature).masked_fill(~of.masks, float("-inf"))
    return torch.log_softmax(scaled, dim=-1)[range(len(call.completion_ids)), call.completion_ids]


def reference(model: Any, calls: Sequence[Sampled]) -> Measured:
    """−Σ_r 1/(R·N_r) Σ_t min(ρ A, clip(ρ, .8, 1.28) A), all tokens counted."""
    model.zero_grad()
    tokens: dict[str, int] = {}
    for of in calls:
        tokens[of.call.rollout_id] = tokens.get(of.call.rollout_id, 0) + len(of.call.completion_ids)
    total = torch.zeros((), dtype=torch.float64)
    for of in calls:
        ratio = torch.exp(logprobs(model, of) - torch.tensor(of.call.logprobs, dtype=torch.float32).double())
        clipped = ratio.clamp(0.8, 1.28)
        objective = torch.minimum(ratio * of.call.advantage, clipped * of.call.advantage)
        total = total - objective.sum() / (len(tokens) * tokens[of.call.rollout_id])
    total.backward()
    return float(total.detach()), gradients(model)


def replayed(replayer: Replayer, calls: Sequence[LoggedCall]) -> Replay:
    return replayer.replay(
        ConstrainedCall(row, call.constraint, call.constraint_start or 0, np.array(call.completion_ids, dtype=np.int32))
        for row, call in enumerate(calls)
        if call.constraint is not None
    )


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["padded", "packed", "tree"])
def test_loss_and_gradient_are_those_of_the_masked_distribution(
    mode: str, tokenizer: Any, replayer: Replayer, double_model: Any, make_trainer: Callable[..., Any]
) -> None:
    """Every kind, twice from one prompt (n = 2), followed by an observation, a second turn, and a free call."""
    trainer = make_trainer(TrainSettings(observation_weight=0.3), double=True)
    trainer.scorer.chunk = 7 * SIZE
    calls: list[Sampled] = []
    for number, constraint in enumerate(KINDS.values()):
        for copy in (0, 1):
            prompt = np.random.default_rng(number).integers(3, SIZE, 9).tolist()
            first = sampled(constraint, tokenizer, trainer.policy, 10 * number + copy, prompt=prompt)
            known = first.call.prompt_ids + first.call.completion_ids
            place = {"call_index": 1, "segment_pos": 1, "prefix_len": len(known)}
            second = sampled(
                Constraint(), tokenizer, trainer.policy, 10 * number + copy, prompt=[*known, 5, 6], **place
            )
            calls += [first, dataclasses.replace(second, call=dataclasses.replace(second.call, constraint=None))]
    turns = ChatTurns(np.array([6], dtype=np.int32), frozenset(range(SIZE)))
    loss, expected = reference(trainer.policy, calls)
    trainer.model.zero_grad()
    observed = 0.3 * observation_loss(trainer.policy, [of.call for of in calls], turns)
    observed.backward()
    of_observed = gradients(trainer.policy)
    expected = {name: gradient + of_observed[name] for name, gradient in expected.items()}
    logged = [of.call for of in calls]
    replay = replayed(replayer, logged)
    assert (replay.dropped, len(replay.limits)) == ({}, 2 * len(KINDS))
    limited = [dataclasses.replace(call, limits=replay.limits.get(row)) for row, call in enumerate(as_calls(logged))]
    settings, rows = TrainSettings(), make_sequences(limited, merge=True, turns=turns)
    (step,) = plan_steps(
        rows,
        limited,
        steps=1,
        rule=find_rule(settings),
        layout=BatchLayout(mode, 300, pair=0.0, blocks=False),
        rng=np.random.default_rng(0),
    )
    step = step.share(0, 1).build(rows)
    assert len(step.micro_batches) > 1
    trainer.model.zero_grad()
    found = float(trainer.accumulate(trainer.model, list(step.micro_batches)))
    assert_same((found, gradients(trainer.policy)), (loss + float(observed.detach()), expected), 1e-9)


def test_masks_of_a_replay_are_those_of_the_library(tokenizer: Any, replayer: Replayer, double_model: Any) -> None:
    for number, (name, constraint) in enumerate(KINDS.items()):
        of = sampled(constraint, tokenizer, double_model, number)
        limits = replayed(replayer, [of.call]).limits[0]
        bits = [
            np.unpackbits(limits.table.masks([index])[0].view(np.uint8), bitorder="little")[:SIZE]
            for index in limits.index
            if index >= 0
        ]
        allowed = np.stack(bits) if bits else np.ones((len(of.masks), SIZE))
        assert np.array_equal(allowed.astype(bool), of.masks.numpy()), name
        assert np.array_equal(limits.forced(), of.masks.sum(dim=1).numpy() == 1), name


def test_a_grammar_that_begins_after_reasoning_masks_nothing_before_and_nothing_behind_its_end(
    tokenizer: Any, replayer: Replayer
) -> None:
    ids = [*tokenizer.encode("the answer"), *tokenizer.encode("12x"), STOP, 50]
    free = len(tokenizer.encode("the answer"))
    (limits,) = replayer.replay(
        [ConstrainedCall(0, KINDS["regex"].to_json(), free, np.array(ids, dtype=np.int32))]
    ).limits.values()
    assert (limits.index[:free] == -1).all()
    assert (limits.index[free:-1] >= 0).all()
    assert limits.index[-1] == -1


def hostile() -> dict[str, Constraint]:
    levels = '{"type":"array","items":' * 4000 + "{}" + "}" * 4000
    return {
        "not_compiled": grammar("regex", "regex", "([0-9]"),
        "slow": grammar("json_schema", "json_schema", levels),
        "not_reproduced": KINDS["choice"],
        "other_version": grammar("regex", "regex", "[0-9]+", version="0.0.1"),
        "other_vocabulary": grammar("regex", "regex", "[0-9]+", vocab_size=320),
        "guidance_regex": grammar("regex", "regex", "[0-9]+", library="guidance"),
        "beam_search": Constraint(others=("beam_search",)),
        "long_bad_words": Constraint(bad_words=((5,) * 65,)),
    }


def test_what_cannot_be_replayed_is_left_out_by_name_and_the_rest_is_trained(
    run: Run, tmp_path: Path, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainspan_training.constraints.replay._LIMIT_S", 1.0)
    good = [sampled(KINDS["regex"], tokenizer, model, seed).call for seed in (1, 2)]
    bad = [
        dataclasses.replace(good[0], rollout_id=name, constraint=constraint.to_json())
        for name, constraint in hostile().items()
    ]
    broken = dataclasses.replace(good[0], rollout_id="not_readable", constraint="{")
    late = dataclasses.replace(good[0], rollout_id="late", constraint_start=len(good[0].completion_ids) + 1)
    write_dataset(tmp_path / "dataset", [*good, *bad, broken, late])
    (result,) = run()
    assert result.record
    assert (result.failure, result.record.rows, result.record.constrained_calls) == (None, 2, 2)
    assert result.record.unreplayed_calls == {
        **{f"constrained:{call.rollout_id}": 1 for call in bad},
        "constrained:not_readable": 2,
    }


def test_a_round_gives_up_constraints_beyond_its_time(
    tokenizer: Any, replayer: Replayer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most frequent constraints come first."""
    rare, common = (sampled(KINDS[name], tokenizer, model, 0).call for name in ("bad_words", "logit_bias"))
    now = iter([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr("trainspan_training.constraints.replay.time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr("trainspan_training.constraints.replay._ROUND_S", 3.5)
    replay = replayed(replayer, [rare, common, common])
    assert (sorted(replay.limits), replay.dropped) == ([1, 2], {0: "constrained:slow"})


def test_a_dataset_whose_calls_cannot_be_replayed_is_skipped_with_the_reason(run: Run, tmp_path: Path) -> None:
    call = LoggedCall(
        "a",
        [3, 4],
        [5, 6],
        [-1.0, -1.0],
        1.0,
        constraint=grammar("regex", "regex", "[0-9]+", version="0.0.1").to_json(),
    )
    write_dataset(tmp_path / "dataset", [call, dataclasses.replace(call, rollout_id="b")])
    (result,) = run(rounds=1)
    assert result.skipped == "all 2 calls cannot be replayed: constrained:other_version"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("split", [False, True])
def test_two_processes_train_constrained_calls_as_one_does(
    split: bool, tmp_path: Path, model: Any, model_dir: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replays its own calls; the weights, whole or split over both, equal those of a single process."""
    monkeypatch.setenv("TRAINSPAN_MODEL__MICRO_BATCH_TOKENS", "200")
    calls = [
        sampled(constraint, tokenizer, model, 10 * number + copy).call
        for number, constraint in enumerate(KINDS.values())
        for copy in (0, 1)
    ]
    events, weights = {}, {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        write_dataset(folder / "dataset", calls)
        for name, value in FSDP.items() if split and processes == 2 else ():
            monkeypatch.setenv(name, value)
        events[processes] = train(folder, model_dir, processes)[-1]
        weights[processes] = tensors(folder / "checkpoints/policy-000001")
        (record,) = metrics.read_records(folder / "checkpoints")
        assert (record["constrained_calls"], record["unreplayed_calls"]) == (len(calls), {})
    for name in ("loss", "grad_norm", "logp_diff_mean", "entropy"):
        assert events[2][name] == pytest.approx(events[1][name], rel=1e-4, abs=1e-7), name
    assert max(float((weights[2][name] - weights[1][name]).abs().max()) for name in weights[1]) < 1e-5

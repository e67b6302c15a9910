"""Loss and gradient against the references, over every supported option, and the trainer's measurements."""

import dataclasses
import json
import math
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.support.dataset_files import LoggedCall, sample_rollouts
from tests.training.support.exactness import trainers
from tests.training.support.exactness.covering import OPTIONS, Case, cases
from tests.training.support.exactness.references import (
    Measured,
    assert_same,
    measured,
    mixed_rollouts,
    one_step,
    reference,
)
from tests.training.support.processes.forks import forked
from tests.training.support.processes.pair import FSDP
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.model.loading import load_model
from trainspan_training.objective.options import clip_range


@pytest.fixture(scope="module")
def logged(double_model: Any) -> list[LoggedCall]:
    return mixed_rollouts(double_model)


@pytest.mark.ci
@pytest.mark.parametrize("case", cases(processes=1), ids=str)
def test_loss_and_gradient_equal_the_reference_in_float64(
    case: Case, logged: list[LoggedCall], double_model: Any, model_dir: Path, tmp_path: Path
) -> None:
    trainer = trainers.make_trainer(trainers.policy_of(case, double_model), model_dir, case.settings, tmp_path)
    step = trainers.prepared(trainer, case, trainers.step_of(case, logged), double_model)
    assert len(step.micro_batches) > 3 or case.tokens > 60
    assert (step.micro_batches[0].branches is not None) is (case.forward != "padded")
    assert_same(trainers.trained(trainer, step), trainers.expected(case, logged, double_model), 1e-9)


@pytest.mark.parametrize("case", [Case(kl=0.1), Case(observations=0.3, layout="tree", tokens=60)], ids=str)
def test_the_terms_beside_trls_equal_the_reference_in_float64(
    case: Case, logged: list[LoggedCall], double_model: Any, model_dir: Path, tmp_path: Path
) -> None:
    """Some of the cases above, so that terms without any other test are in `make test`."""
    trainer = trainers.make_trainer(trainers.policy_of(case, double_model), model_dir, case.settings, tmp_path)
    step = trainers.prepared(trainer, case, trainers.step_of(case, logged), double_model)
    assert_same(trainers.trained(trainer, step), trainers.expected(case, logged, double_model), 1e-9)


def test_micro_batches_that_are_too_large_to_keep_their_activations_are_recomputed(
    logged: list[LoggedCall], double_model: Any, model_dir: Path, tmp_path: Path
) -> None:
    """A layer runs once for a micro-batch of at most the budget's size, and twice for a larger one."""
    case = Case(checkpointing=True, tokens=60)
    trainer = trainers.make_trainer(trainers.policy_of(case, double_model), model_dir, case.settings, tmp_path)
    trainer.policy.gradient_checkpointing_enable({"use_reentrant": False})  # as `train()` does
    batches = trainers.step_of(case, logged).micro_batches
    sizes = sorted({batch.tokens.size for batch in batches})
    trainer.scorer.kept = sizes[len(sizes) // 2]
    passes: list[int] = []
    trainer.policy.transformer.h[0].register_forward_pre_hook(lambda *_: passes.append(1))
    found = {}
    for batch in batches:
        passes.clear()
        trainer.accumulate(trainer.model.train(), [batch])
        found[batch.tokens.size] = len(passes)
    assert found == {size: 1 if size <= trainer.scorer.kept else 2 for size in sizes}
    assert set(found.values()) == {1, 2}


Pair = Callable[..., dict[Case, Measured]]


@pytest.fixture(scope="module")
def pair(
    logged: list[LoggedCall], double_model: Any, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    """The results of two processes together for each of their cases."""
    return partial(_pair, logged, double_model, model_dir, tmp_path_factory.mktemp("pair"))


def _pair(
    logged: list[LoggedCall], double_model: Any, model_dir: Path, parent: Path, **environ: str
) -> dict[Case, Measured]:
    folder = Path(tempfile.mkdtemp(dir=parent))
    record = {"vocabulary": double_model.config.vocab_size, "calls": [dataclasses.asdict(call) for call in logged]}
    (folder / "logged.json").write_text(json.dumps(record))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = ("tests.training.support.processes.pair", str(model_dir), str(folder / "logged.json"), str(folder))
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environ}
    with ExitStack() as running:
        pair = [running.enter_context(forked(folder, *program, RANK=r, LOCAL_RANK=r, **shared)) for r in "01"]
        ends = [process.wait(240) for process in pair]
    assert [end.code for end in ends] == [0, 0], "\n".join(end.err for end in ends)[-3000:]
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            gradient = {name: file.get_tensor(name) for name in list(file.keys())}
        found[Case(**json.loads(about["case"]))] = (float(about["loss"]), gradient)
    return found


@pytest.fixture(scope="module")
def of_two_processes(pair: Pair) -> dict[Case, Measured]:
    return pair()


@pytest.mark.ci
@pytest.mark.parametrize("case", cases(processes=2), ids=str)
def test_two_processes_equal_the_reference_in_float64(
    case: Case, of_two_processes: dict[Case, Measured], logged: list[LoggedCall], double_model: Any
) -> None:
    assert_same(of_two_processes[case], trainers.expected(case, logged, double_model), 1e-9)


@pytest.mark.slow
def test_two_processes_that_hold_half_of_the_weights_each_equal_the_reference_in_float64(
    pair: Pair, logged: list[LoggedCall], double_model: Any
) -> None:
    found = pair(**FSDP)
    assert found.keys() == set(cases(processes=2))
    for case, seen in found.items():
        assert_same(seen, trainers.expected(case, logged, double_model), 1e-9)


def test_the_cases_cover_every_pair_of_values() -> None:
    found = [case for processes in (1, 2) for case in cases(processes)]
    for one in OPTIONS:
        for two in OPTIONS:
            seen = {(getattr(case, one), getattr(case, two)) for case in found}
            assert one == two or seen == {(a, b) for a in OPTIONS[one] for b in OPTIONS[two]}


@pytest.mark.parametrize("tokens", [16384, 60])
@pytest.mark.parametrize("mode", ["padded", "packed", "tree"])
def test_loss_and_gradient_equal_the_reference_in_float32(
    make_trainer: Callable[..., Any], model: Any, tokens: int, mode: str
) -> None:
    settings = TrainSettings()
    rollouts = mixed_rollouts(model)
    step = one_step(rollouts, tokens=tokens, mode=mode)
    expected = reference(load_model(Path(model.config._name_or_path)), rollouts, settings)
    assert_same(measured(make_trainer(settings), step), expected, 1e-5)


def test_bfloat16_changes_loss_and_gradient_by_its_rounding_only(make_trainer: Callable[..., Any], model: Any) -> None:
    step = one_step(mixed_rollouts(model))
    loss, gradient = measured(make_trainer(), step)
    rough_loss, rough_gradient = measured(make_trainer(dtype="bfloat16"), step)
    assert all(value.dtype == torch.float32 for value in rough_gradient.values())
    assert rough_loss != loss
    assert rough_loss == pytest.approx(loss, abs=0.02)
    exact, rough = (torch.cat([value.flatten() for value in values.values()]) for values in (gradient, rough_gradient))
    assert float(torch.cosine_similarity(exact, rough, dim=0)) > 0.97


def test_processes_with_whole_weights_hold_their_gradients_once(make_trainer: Callable[..., Any]) -> None:
    """Otherwise DDP's buckets would be a second copy, which the memory estimate does not count."""
    assert make_trainer().accelerator.ddp_handler.gradient_as_bucket_view


def test_clipping_happens_on_both_sides_in_these_data(make_trainer: Callable[..., Any], double_model: Any) -> None:
    trainer = make_trainer(double=True)
    trainer.training_step(trainer.model, list(one_step(mixed_rollouts(double_model)).micro_batches))
    sums = trainer.take_stats()[0].sums
    assert sums.clipped_low > 2
    assert sums.clipped_high > 2


def test_an_importance_ratio_of_two_doubles_the_unclipped_loss_and_gradient(
    make_trainer: Callable[..., Any], double_model: Any
) -> None:
    settings = TrainSettings(epsilon_high=9.0, epsilon=0.9)
    fresh = [
        dataclasses.replace(call, advantage=0.5 + index)
        for index, call in enumerate(sample_rollouts(double_model, rollouts=3))
    ]
    stale = [dataclasses.replace(call, logprobs=[value - math.log(2) for value in call.logprobs]) for call in fresh]
    trainer = make_trainer(settings, double=True)
    loss, gradient = measured(trainer, one_step(fresh))
    expected = 2 * loss, {name: 2 * value for name, value in gradient.items()}
    # the logged log-probabilities are float32
    assert_same(measured(trainer, one_step(stale)), expected, 1e-5)
    assert loss < -0.5


def test_a_token_beyond_the_clip_gives_no_gradient_that_would_move_it_further(
    make_trainer: Callable[..., Any], double_model: Any
) -> None:
    call = sample_rollouts(double_model, rollouts=1, turns=1)[0]
    far = dataclasses.replace(call, advantage=1.0, logprobs=[value - math.log(2) for value in call.logprobs])
    trainer = make_trainer(double=True)
    loss, gradient = measured(trainer, one_step([far]))
    assert loss == pytest.approx(-1.28, rel=1e-6)
    assert all(float(value.abs().max()) == 0 for value in gradient.values())


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        (TrainSettings(), 0.8, 1.28),
        (TrainSettings(ratio="call"), 0.9997, 1.0004),
        (TrainSettings(ratio="call", epsilon=0.1), 0.9, 1.0004),
        (TrainSettings(ratio="call", epsilon_high=0.2), 0.9997, 1.2),
        (TrainSettings(ratio="call", loss="cispo"), 0.0, 5.0),
    ],
)
def test_the_clip_range_fits_the_unit_of_the_ratio(settings: TrainSettings, low: float, high: float) -> None:
    assert clip_range(settings) == pytest.approx((low, high), abs=1e-12)


def test_a_call_beyond_gspos_clip_gives_no_gradient(make_trainer: Callable[..., Any], double_model: Any) -> None:
    """Its geometric mean ratio is e^0.001, above 1.0004; as a token ratio it would be far from any clip."""
    call = sample_rollouts(double_model, rollouts=1, turns=1)[0]
    moved = dataclasses.replace(call, advantage=1.0, logprobs=[value - 1e-3 for value in call.logprobs])
    loss, gradient = measured(make_trainer(TrainSettings(ratio="call"), double=True), one_step([moved]))
    assert loss == pytest.approx(-1.0004, abs=1e-6)
    assert all(float(value.abs().max()) == 0 for value in gradient.values())
    _, gradient = measured(make_trainer(double=True), one_step([moved]))
    assert any(float(value.abs().max()) > 0 for value in gradient.values())


def test_exact_sums_are_those_of_the_tokens_whatever_the_micro_batches(
    make_trainer: Callable[..., Any], model: Any
) -> None:
    """All ratios are e^0.1 by construction: k1 = −0.1, k3 = e^0.1 − 1.1, nothing clipped."""
    calls = [
        dataclasses.replace(call, logprobs=[value - 0.1 for value in call.logprobs])
        for call in sample_rollouts(model, rollouts=5, turns=2)
    ]
    for tokens in (16384, 40):
        trainer = make_trainer()
        trainer.training_step(trainer.model, list(one_step(calls, tokens=tokens).micro_batches))
        sums = trainer.take_stats()[0].sums
        assert sums.tokens == sum(len(call.completion_ids) for call in calls)
        assert sums.mean("k1") == pytest.approx(-0.1, abs=1e-5)
        assert sums.mean("k3") == pytest.approx(math.exp(0.1) - 1.1, abs=1e-6)
        assert sums.max_ratio == pytest.approx(math.exp(0.1), abs=1e-4)
        assert sums.clipped_low == sums.clipped_high == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_moves_no_weight(make_trainer: Callable[..., Any], model: Any, value: float) -> None:
    calls = sample_rollouts(model, rollouts=2, turns=1)
    step = one_step([dataclasses.replace(calls[0], advantage=value), calls[1]])
    trainer = make_trainer()
    trainer.training_step(trainer.model, list(step.micro_batches))
    assert trainer.failure
    assert trainer.failure.startswith("the loss is")
    assert all(parameter.grad is None for parameter in trainer.model.parameters())

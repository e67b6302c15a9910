"""Training at real sizes with random weights: seconds of a step, tokens, memory against the estimate, and where the time went.

The share of the card's speed is a step's floating-point operations (without recomputation) over its seconds and over the rate
of bf16 matrix products that `facts` measured.
"""

import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.facts import product
from benchmarks.gpu.figures import TINY, attempt, matmul_rate, note
from benchmarks.support.workload import Workload
from benchmarks.training.accelerator import SIZES, SMALL, Size, config_of, make_model, operations
from tests.support.dataset_files import LoggedCall

__all__ = ["Case", "agent_work", "calls_of", "main", "measured", "sizes"]

WARM, MEASURED = 1, 2
LIMIT_S = float(os.environ.get("GPU_KIT_BENCH_SECONDS", "145"))
"""No case begins later."""
_UNLIMITED = {"old_policy": "logged", "learning_rate": 1e-9, "max_kl": 1e30, "max_ratio": 1e300}


@dataclass(frozen=True, slots=True)
class Case:
    size: str
    work: str
    """`agent`: six turns in groups of eight; `long`: answers that fill a micro-batch; `ragged`: answers of all lengths."""
    settings: dict[str, Any]
    profile: bool = False


CASES = {
    "1.5B_long_packed": Case("1.5B", "long", {"forward": "packed"}, profile=True),
    "1.5B_long_packed_recomputed": Case(
        "1.5B", "long", {"forward": "packed", "gradient_checkpointing": True}, profile=True
    ),
    "0.5B_agent_auto": Case("0.5B", "agent", {"forward": "auto"}, profile=True),
    "0.5B_long_packed": Case("0.5B", "long", {"forward": "packed"}, profile=True),
    "0.5B_ragged_packed": Case("0.5B", "ragged", {"forward": "packed"}),
    "0.5B_long_packed_kept": Case("0.5B", "long", {"forward": "packed", "gradient_checkpointing": False}),
    "0.5B_long_padded": Case("0.5B", "long", {"forward": "padded"}),
    "0.5B_agent_padded": Case("0.5B", "agent", {"forward": "padded"}),
    "0.5B_ragged_padded": Case("0.5B", "ragged", {"forward": "padded"}),
    "1.5B_agent_auto": Case("1.5B", "agent", {"forward": "auto"}),
    "1.5B_long_adapter": Case("1.5B", "long", {"forward": "packed", "adapter": "lora"}),
}
"""Most important first: the time limit cuts from the end."""

KERNELS = {
    "attention": r"flex|flash|fmha|attention|sdpa|triton_tem",
    "matrix products": r"gemm|cutlass|nvjet|xmma|cublas|sm90_|s16816|wgmma",
    "optimizer and clipping": r"multi_tensor|foreach|adam|fused|lpnorm|norm_",
    "softmax and reductions": r"softmax|reduce|logsumexp|entr",
    "copies": r"memcpy|memset|copy",
    "indexing": r"index|gather|scatter|embedding",
    "elementwise": r"elementwise|vectorized|triton_",
}
"""Kind → pattern of kernel names, first match; rough, since names tell little of fused kernels."""


def main(names: Sequence[str]) -> None:
    from trainspan_training.devices.cores import prepare_process
    from trainspan_training.objective.heavy_imports import import_training

    prepare_process()
    import_training()
    with tempfile.TemporaryDirectory() as folder:
        if matmul_rate() is None:
            attempt("facts", "matmul_bf16", lambda: product("bfloat16"))
        for name in names or CASES:
            attempt("bench", name, lambda name=name: measured(CASES[name], Path(folder)), LIMIT_S)
    note("bench", "done", True)


def sizes() -> dict[str, Size]:
    return dict.fromkeys(SIZES, SMALL["small"]) if TINY else SIZES


def agent_work() -> Workload:
    return Workload(2, 4, 3, 48, 8, 8) if TINY else Workload(8, 8, 6, 1024, 128, 128)


def calls_of(work: str, vocabulary: int) -> list[LoggedCall]:
    """Logged calls of a workload; `ragged` has lengths from a lognormal distribution, in this order."""
    import numpy as np

    if work == "agent":
        return agent_work().calls(vocabulary)
    if work == "long":
        long = Workload(2, 1, 1, 16, 112, 0) if TINY else Workload(4, 1, 1, 256, 16_128, 0)
        return long.calls(vocabulary)
    rng = np.random.default_rng(5)
    rows, middle, most, prompt = (6, 20, 100, 8) if TINY else (48, 1500, 15_000, 256)
    lengths = np.clip(rng.lognormal(np.log(middle), 0.8, rows), 8, most).astype(int).tolist()
    return [
        LoggedCall(
            f"rollout-5-{index}",
            rng.integers(3, vocabulary, prompt).tolist(),
            rng.integers(3, vocabulary, length).tolist(),
            [-11.9] * length,
            advantage=float(rng.normal()),
        )
        for index, length in enumerate(lengths)
    ]


def measured(case: Case, folder: Path) -> dict[str, Any]:
    """Median seconds of the steps after the first, in the trainer's own loop."""
    import torch

    from tests.support.models.tiny_model import make_tiny_model
    from trainspan_schemas.config.settings import TrainSettings
    from trainspan_training.devices.team import Team
    from trainspan_training.model.loading import load_tokenizer
    from trainspan_training.objective import memory
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    cuda = torch.cuda.is_available()
    settings = TrainSettings(**case.settings, **_UNLIMITED)
    torch.manual_seed(0)
    config = config_of(sizes()[case.size])
    config.max_position_embeddings = 32_768
    budget = memory.fit(config, settings, memory.available(settings, cuda=cuda), cuda=cuda, team=Team())
    settings = replace(settings, gradient_checkpointing=budget.kept < budget.longest)
    model = _model(case, settings, folder, cuda=cuda)
    began = time.perf_counter()
    step = planned(case, settings, config, budget, cuda=cuda)
    planning_s = time.perf_counter() - began
    marks: list[float] = []

    def steps() -> Iterator[list[Any]]:
        for _ in range(WARM + MEASURED + 1):
            if cuda:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            if len(marks) == WARM + 1 and cuda:
                torch.cuda.reset_peak_memory_stats()
            if len(marks) <= WARM + MEASURED:
                yield list(step.micro_batches)
        trainer.control.should_training_stop = True

    tokenizer = load_tokenizer(make_tiny_model(folder / f"tokenizer-{len(list(folder.iterdir()))}", hidden=32))
    trainer = TransitionGRPOTrainer(model, tokenizer, settings, steps(), str(folder), budget=budget)
    trainer.train()
    took = [later - earlier for earlier, later in zip(marks[WARM:-1], marks[WARM + 1 :], strict=True)]
    figures = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "planning_s": round(planning_s, 3),
        "first_step_s": round(marks[1] - marks[0], 2),
        "step_s": round(statistics.median(took), 4),
        "step_s_all": [round(seconds, 4) for seconds in took],
        "micro_batch_tokens": budget.tokens,
        "longest_row": budget.longest,
        "loss": trainer.take_stats()[0].loss,
        "failure": trainer.failure,
        **_speed(case, step, statistics.median(took)),
    }
    if cuda:
        largest = max(batch.tokens.size for batch in step.micro_batches)
        chosen = replace(settings, micro_batch_tokens=largest, gradient_checkpointing=largest > budget.kept)
        estimate = memory.estimate(config, chosen, cuda=True, logits=budget.logits)
        figures |= _peaks(estimate) | _compilation()
    if case.profile and cuda:
        try:
            figures["profile"] = _profiled(lambda: _one_step(trainer, step))
        except Exception as error:  # noqa: BLE001 -- the figures count
            figures["profile_error"] = repr(error)
    return figures


def planned(case: Case, settings: Any, config: Any, budget: Any, *, cuda: bool) -> Any:
    """The step's micro-batches, as the trainer plans them."""
    import numpy as np

    from tests.training.support.exactness.references import as_calls
    from trainspan_training.data.layout import batch_layout
    from trainspan_training.data.loss_weights import find_rule
    from trainspan_training.data.sequences import make_sequences
    from trainspan_training.data.steps import plan_steps

    layout = batch_layout(settings, config, cuda=cuda, budget=budget)
    calls = as_calls(calls_of(case.work, config.vocab_size), group=lambda call: call.rollout_id)
    rows = make_sequences(calls, merge=True)
    rng = np.random.default_rng(0)
    (step,) = plan_steps(rows, calls, steps=1, rule=find_rule(settings), layout=layout, rng=rng)
    return step.build(rows)


def _model(case: Case, settings: Any, folder: Path, *, cuda: bool) -> Any:
    from trainspan_training.model.kernels import accelerate_layers
    from trainspan_training.objective import attention

    model = make_model(sizes()[case.size])
    model.config.max_position_embeddings = 32_768
    if settings.forward != "padded":
        attention.prepare(model, settings.forward)
    if cuda:
        accelerate_layers(model, bf16=True)
    return _with_adapter(model, settings, folder, cuda=cuda) if settings.adapter == "lora" else model


def _with_adapter(model: Any, settings: Any, folder: Path, *, cuda: bool) -> Any:
    import torch

    from trainspan_training.model.lora import add_adapter
    from trainspan_training.model.starting_policy import Policy

    frozen = model.to(torch.bfloat16) if cuda else model
    return add_adapter(frozen, settings, Policy(folder, None, str(folder), 0, folder))


def _speed(case: Case, step: Any, seconds: float) -> dict[str, Any]:
    work, rate = operations(sizes()[case.size], step.micro_batches, step.trained), matmul_rate()
    return {
        "micro_batches": len(step.micro_batches),
        "branched": step.micro_batches[0].branches is not None,
        "trained_tokens": step.trained,
        "forwarded_tokens": step.forwarded,
        "padded_tokens": step.padded,
        "unique_tokens": step.unique,
        "forwarded_per_s": round(step.forwarded / seconds),
        "trained_per_s": round(step.trained / seconds),
        "tflops": round(work / seconds / 1e12, 1),
        "share_of_matmul": round(work / seconds / rate, 4) if rate else None,
    }


def _peaks(estimate: Any) -> dict[str, Any]:
    import torch

    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {
        "estimate_gib": round(estimate.total / 2**30, 2),
        "estimate_parts": str(estimate),
        "peak_allocated_gib": round(allocated / 2**30, 2),
        "peak_reserved_gib": round(reserved / 2**30, 2),
        "peak_over_estimate": round(allocated / estimate.total, 3),
        "reserved_over_estimate": round(reserved / estimate.total, 3),
    }


def _compilation() -> dict[str, Any]:
    """How often lengths caused a compilation; see `attention._compiled` for its limit."""
    import torch._dynamo.utils as dynamo

    return {
        "compiled_frames": dict(dynamo.counters.get("frames", {})),
        "graph_breaks": sum(dynamo.counters.get("graph_break", {}).values()),
        "recompiled": {str(code.co_name): len(reasons) for code, reasons in dynamo.guard_failures.items()},
    }


def _one_step(trainer: Any, step: Any) -> None:
    trainer.accumulate(trainer.model, list(step.micro_batches))
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.model.zero_grad(set_to_none=True)


def _profiled(act: Callable[[], None]) -> dict[str, Any]:
    """GPU seconds of one call by kind of kernel, the greatest kernels, and the share of the time in which the GPU was busy."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        act()
        torch.cuda.synchronize()
    wall = time.perf_counter() - began
    kernels: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if str(event.device_type).endswith("CUDA") and not event.name.startswith("ProfilerStep"):
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    seconds = {name: sum(times) for name, times in kernels.items()}
    total = sum(seconds.values())
    by_kind: dict[str, float] = {}
    for name, one in seconds.items():
        kind = next((kind for kind, pattern in KERNELS.items() if re.search(pattern, name.lower())), "other")
        by_kind[kind] = by_kind.get(kind, 0.0) + one
    greatest = sorted(seconds, key=lambda name: -seconds[name])[:14]
    return {
        "wall_s": round(wall, 3),
        "gpu_s": round(total, 3),
        "launches": sum(len(times) for times in kernels.values()),
        "share": {kind: round(one / total, 3) for kind, one in sorted(by_kind.items(), key=lambda item: -item[1])},
        "greatest": [[name[:110], round(seconds[name], 4), len(kernels[name])] for name in greatest],
    }


if __name__ == "__main__":
    main(sys.argv[1:])

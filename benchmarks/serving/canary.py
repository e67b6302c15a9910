"""The canary's verdicts over many swaps of a real model: correct weights that it refuses, stale ones that it accepts.

SmolLM2-135M-Instruct under a real vLLM in float32 and bfloat16; canaries scored in float32 and in bfloat16. Updates are
whole Adam steps from 1e-6 (a hundredth of bfloat16's resolution) to 1e-4; each is swapped in and out several times. Faults
are then planted: skipped loads, an unpacked output head, a prefix cache that is not reset. It also compares the server's
log-probabilities of sampled tokens with the trainer's, by the dtypes of both. `TRAINSPAN_BENCH_MODEL` names a folder with
the model; without it `tools/pretrained_model.py` creates one. It takes about 25 minutes on two cores.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.policy_server.faults import FAULT_VARIABLE
from tests.support.policy_server.process import RunningServer, policy_server
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, checkpoint_name

_REPOSITORY = Path(__file__).parents[2]
_UPDATES = ((1e-6, 1), (1e-6, 4), (1e-5, 1), (1e-5, 4), (1e-4, 2))
"""Learning rate of Adam and number of steps."""
_TURNS = 3
"""Swaps to the update and back, for each update."""
_SETUPS = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
"""Dtype of the server, and of the trainer's scores."""
_QUESTIONS = tuple(
    f"{what} {of}"
    for what in ("Tell me a short story about", "What should one know about", "List three facts about")
    for of in ("the sea.", "bread.", "the moon.", "old trains.", "winter.", "chess.", "rivers.", "bees.")
)
_FAULTS = ("frozen", "unpacked", "forgotten reset")
_FIGURES = ("mean_abs_diff", "max_abs_diff", "max_abs_change", "shift", "shift_error")


def measure() -> dict[str, Any]:
    """Counts of verdicts, and the figures of each update as lists over swaps."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        base = Path(os.environ.get("TRAINSPAN_BENCH_MODEL") or _pretrained(root / "model"))
        subprocess.run([sys.executable, "-m", "benchmarks.serving.canary", str(base), str(root / "made")], check=True)
        figures: dict[str, Any] = {}
        for server, scores in _SETUPS:
            figures[f"server {server}, scores {scores}"] = _measure_setup(base, root, server, scores)
    total = {name: sum(setup[name] for setup in figures.values()) for name in ("right", "refused", "planted", "missed")}
    return {**total, **figures}


def _pretrained(out: Path) -> Path:
    subprocess.run([sys.executable, str(_REPOSITORY / "tools/pretrained_model.py"), str(out)], check=True)
    return out


def _measure_setup(base: Path, root: Path, dtype: str, scores: str) -> dict[str, Any]:
    home = root / f"{dtype}-{scores}"
    found: dict[str, Any] = {"right": 0, "refused": 0, "planted": 0, "missed": 0, "updates": {}, "faults": {}}
    arguments = ("--collector", "none", "--dtype", dtype, "--checkpoints", str(root / "made" / scores))
    flags = ["--worker-extension-cls", "tests.support.policy_server.faults.FaultyWorker", "--max-model-len", "1024"]
    flags += ["--middleware", "tests.support.policy_server.faults.FaultyEngine"]
    environment = {FAULT_VARIABLE: str(home / "fault")}
    with policy_server(base, home, *arguments, flags=flags, environment=environment) as server:
        sampled = home / "sampled.json"
        sampled.write_text(json.dumps([_sample(server, question) for question in _QUESTIONS]))
        for index, (rate, steps) in enumerate(_UPDATES):
            there, back = 2 * index + 1, 2 * index + 2
            name = f"{steps} × {rate:g}"
            answers = [_swap(server, version) for _ in range(_TURNS) for version in (there, back)]
            found["right"] += len(answers)
            found["refused"] += sum(status != 200 for status, _ in answers)
            found["updates"][name] = _summary([answer for _, answer in answers])
            for fault in _FAULTS:
                with _planted(home / "fault", fault):
                    status, answer = _swap(server, there)
                found["planted"] += 1
                found["missed"] += status == 200
                found["faults"][f"{fault}, {name}"] = _summary([answer])
    command = [sys.executable, "-m", "benchmarks.serving.canary", str(base), str(sampled)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return found | {"agreement on sampled tokens, by the trainer's dtype": json.loads(done.stdout)}


def _sample(server: RunningServer, question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    body = {"model": "policy", "messages": messages, "max_tokens": 48, "temperature": 1.0, "seed": 0}
    status, answer, _ = server.post("/v1/chat/completions", {**body, "logprobs": True, "return_token_ids": True})
    if status != 200:
        raise RuntimeError(f"sampling failed: {answer}")
    (choice,) = answer["choices"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return {"prompt": answer["prompt_token_ids"], "completion": choice["token_ids"], "logprobs": logprobs}


def compare(base: Path, sampled: Path) -> dict[str, Any]:
    """Mean and maximum |Δ| and k3 of the sampled tokens, by the trainer's dtype."""
    import numpy as np
    import torch

    from trainspan_training.model.loading import load_model
    from trainspan_training.objective.heavy_imports import import_training
    from trainspan_training.rounds.canary import score_prompts

    import_training()
    torch.set_num_threads(1)
    model, calls = load_model(base), json.loads(sampled.read_text())
    server = np.concatenate([call["logprobs"] for call in calls])
    figures = {}
    for dtype in ("float32", "bfloat16"):
        scores = score_prompts(model, [(call["prompt"], call["completion"]) for call in calls], dtype)
        off = np.concatenate(scores) - server
        k3 = np.exp(off) - 1 - off
        values = {"mean": np.abs(off).mean(), "max": np.abs(off).max(), "k3": k3.mean()}
        figures[dtype] = {"tokens": len(off), **{name: float(f"{value:.3g}") for name, value in values.items()}}
    return figures


def _swap(server: RunningServer, version: int) -> tuple[int, dict[str, Any]]:
    status, answer = server.swap(checkpoint_name(version), version)
    canary = answer.get("canary")
    if canary is None:
        raise RuntimeError(f"the swap to version {version} failed: {answer}")
    print(status, version, canary, answer.get("seconds"), file=sys.stderr, flush=True)
    return status, {**canary, "seconds": answer.get("seconds", {})}


def _summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = sorted({answer["status"] for answer in answers})
    return {
        "verdicts": {kind: sum(answer["status"] == kind for answer in answers) for kind in kinds},
        "tensors_differing": [answer["tensors_differing"] for answer in answers],
        **{
            name: [None if (v := answer[name]) is None else float(f"{v:.3g}") for answer in answers]
            for name in _FIGURES
        },
        "seconds": [answer["seconds"].get("total") for answer in answers],
    }


@contextmanager
def _planted(file: Path, fault: str) -> Iterator[None]:
    file.write_text(fault)
    try:
        yield
    finally:
        file.unlink()


def make_checkpoints(base: Path, out: Path) -> None:
    """Writes two checkpoints for each update, there and back, in one folder per dtype of the scores.

    Steps are Adam's on the language-model loss over the repository's own text.
    """
    import torch

    from trainspan_schemas.artifacts.checkpoint import hash_weights
    from trainspan_training.model.full_weights import copy_companions
    from trainspan_training.model.loading import load_model, load_tokenizer
    from trainspan_training.objective.heavy_imports import import_training
    from trainspan_training.rounds.canary import draw_prompts, make_canary, score_prompts

    import_training()
    torch.set_num_threads(1)
    tokenizer, model = load_tokenizer(base), load_model(base)
    rows = [
        _Text(torch.tensor(tokenizer(path.read_text())["input_ids"][:600]))
        for path in sorted((_REPOSITORY / "docs").glob("*.md"))
    ]
    prompts = draw_prompts(rows, 1024, seed=0)  # type: ignore[arg-type]
    dtypes = sorted({scores for _, scores in _SETUPS})
    before = {dtype: score_prompts(model, prompts, dtype) for dtype in dtypes}
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def write(version: int, source: Path, new: dict[str, Any], parent: dict[str, Any]) -> None:
        meta = CheckpointMeta("full", version, None, str(base), None, hash_weights(source))
        for dtype in dtypes:
            folder = out / dtype / checkpoint_name(version)
            folder.mkdir(parents=True)
            copy_companions(base, folder)
            os.link(source / "model.safetensors", folder / "model.safetensors")
            make_canary(prompts, new[dtype], parent[dtype], dtype).write(folder)
            replace(meta, version=version).write(folder)

    untouched = out / "base"
    untouched.mkdir(parents=True)
    (untouched / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    for index, (rate, steps) in enumerate(_UPDATES):
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        for step in range(steps):
            tokens = rows[step % len(rows)].tokens[None, :256]
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        del optimizer
        made = out / f"made-{index}"
        model.save_pretrained(made)
        after = {dtype: score_prompts(model, prompts, dtype) for dtype in dtypes}
        write(2 * index + 1, made, after, before)
        write(2 * index + 2, untouched, before, after)


class _Text:
    """A row with the one field that `draw_prompts` reads."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens


if __name__ == "__main__":
    model, place = Path(sys.argv[1]), Path(sys.argv[2])
    if place.suffix == ".json":
        print(json.dumps(compare(model, place)))
    else:
        make_checkpoints(model, place)

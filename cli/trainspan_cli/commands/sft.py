"""`trainspan sft`: supervised training, the warm start."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainspan_cli.export_options import (
    AgentOption,
    AllOption,
    FormOption,
    MinRewardOption,
    RoundOption,
    RunOption,
    export_request,
    run_export,
)
from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, Format, FormatOption, settings
from trainspan_schemas.artifacts.checkpoint import base_digest
from trainspan_schemas.command_events import FineTuned, FineTuneEvaluated, FineTuneStarted, FineTuneStep, event_line
from trainspan_schemas.config.load import override
from trainspan_schemas.config.settings import Settings, SftSettings, TrainSettings
from trainspan_schemas.errors import UsageError
from trainspan_schemas.home import served_model

if TYPE_CHECKING:
    from trainspan_processing.export.export import ExportRequest
    from trainspan_training.sft.data.served import StoredPrompt
    from trainspan_training.sft.job import SftOutcome

__all__ = ["sft"]

_SHOWN_EVERY_S = 10.0

_OutOption = Annotated[Path, typer.Option(help="Folder of the finished model; it must not exist.")]
_DataOption = Annotated[
    Path | None, typer.Option(help="File of `trainspan export sft`, or of messages; or a folder of *.jsonl files.")
]
_StoreOption = Annotated[
    list[str] | None, typer.Option(help="Instead: a store, as a path or grpc:// address; may be repeated.")
]
_DatasetOption = Annotated[
    str | None, typer.Option(help="Instead: the folder or URL of a dataset, or a folder of datasets.")
]
_CheckpointsOption = Annotated[
    Path | None,
    typer.Option(help="Make the result the next version of these checkpoints, and swap it in ([train] policy_url)."),
]
_PolicyUrlOption = Annotated[str | None, typer.Option(help="Policy server to swap it in [default: train.policy_url].")]
_ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Train on the rest also if all tool calls are dropped, or no prompt has the tools."),
]
_FinishOption = Annotated[
    bool, typer.Option(help="Train no further: write the result from the newest saved state of the same command.")
]


@setting_options("sft")
@setting_options("model", "adapter", "lora_rank", "device", "dtype", place="of_model")
def sft(
    *,
    out: _OutOption,
    data: _DataOption = None,
    store: _StoreOption = None,
    dataset: _DatasetOption = None,
    run: RunOption = None,
    round: RoundOption = None,
    min_reward: MinRewardOption = None,
    all: AllOption = False,
    agent: AgentOption = None,
    form: FormOption = "chat",
    checkpoints: _CheckpointsOption = None,
    policy_url: _PolicyUrlOption = None,
    force: _ForceOption = False,
    finish: _FinishOption = False,
    given: Given,
    of_model: Given,
    format: FormatOption = Format.TABLE,
    config: ConfigOption = None,
) -> int:
    """Train a model on stored or exported conversations; `serve`, `train` and `loop` start from the result.

    Stopped or killed, the same command continues. From a store, the examples are written to OUT.jsonl first.

    Example: trainspan sft --store .trainspan/spans.duckdb --min-reward 1 --model Qwen/Qwen3-0.6B --out warm
    """
    chosen = settings(config)
    section = _section(chosen, given, of_model)
    chooses: dict[str, Any] = {
        "run": run,
        "round": round,
        "min_reward": min_reward,
        "take_all": all,
        "agents": agent,
        "form": form,
    }
    _check_source(data, store, dataset, chooses)

    from trainspan_training.sft.job import SftJob, check, fine_tune

    check(section)
    prompts: tuple[StoredPrompt, ...] = ()
    if data is None:
        examples = out.with_name(f"{out.name}.jsonl")
        export = export_request("sft", dataset, store or (), examples, chosen, **chooses, model=section.model)
        data = _exported(export, out)
        prompts = _stored_prompts(export, section.model or served_model()) if form == "chat" else ()
    on_event = _Lines() if format == "table" else lambda event: print(event_line(event), flush=True)
    done = fine_tune(SftJob(section, data, out, force=force, prompts=prompts, finish=finish), on_event)
    if done.signal is not None:
        return _interrupted(done, done.signal)
    version = None if checkpoints is None else _adopted(out, checkpoints, policy_url, chosen.train)
    result = FineTuned(str(out), done.steps == 0, version, done.manifest or {})
    print(event_line(result) if format == "json" else _finished(result, checkpoints), flush=True)
    return 0


def _section(chosen: Settings, given: Given, of_model: Given) -> SftSettings:
    """The settings of supervised training with the given options."""
    shared = chosen.sft
    if of_model["adapter"] == "none":  # the adapter of the settings is then the trainer's alone
        shared = replace(shared, lora_rank=None, lora_alpha=None, lora_targets=None)
    section = override(shared, **given, **of_model)
    return override(section, model=section.model or chosen.train.model)


def _finished(result: FineTuned, checkpoints: Path | None) -> str:
    state = "was complete already" if result.was_there else "is complete"
    adopted = "" if result.version is None else f"\nit is version {result.version} in {checkpoints}"
    return f"{result.out} {state}: trainspan serve {result.out}{adopted}"


def _interrupted(done: "SftOutcome", number: int) -> int:
    """Says how to go on after a signal; returns the exit code."""
    print(
        f"trainspan: stopped by {signal.Signals(number).name} after {done.done} of {done.steps or '?'} steps; the same "
        "command continues, and with --finish it ends with what there is",
        file=sys.stderr,
    )
    return 128 + number


def _check_source(
    data: Path | None, store: list[str] | None, dataset: str | None, chooses: Mapping[str, object]
) -> None:
    """Raises UsageError unless there is one source, and options that choose rollouts have some to choose from."""
    if (data is None) == (store is None and dataset is None):
        raise UsageError("name either --data, or --store or --dataset")
    if dataset is not None and Path(dataset).is_file():
        raise UsageError(
            f"--dataset {dataset} is a file, no folder of a dataset: name a store with --store, examples with --data"
        )
    names = {"take_all": "all", "agents": "agent"}
    given = [name for name, value in chooses.items() if value not in (None, False, "chat")]
    if data is not None and given:
        options = ", ".join(f"--{names.get(name, name).replace('_', '-')}" for name in given)
        raise UsageError(f"{options} choose rollouts of a store or a dataset, and --data is a file")


def _adopted(out: Path, checkpoints: Path, policy_url: str | None, train: TrainSettings) -> int:
    """The result's number as the next version of the checkpoints, after the swap."""
    from trainspan_training.adoption import adopt
    from trainspan_training.checkpoints.swap_request import PolicyAddress

    address = PolicyAddress(policy_url or train.policy_url, checkpoints_url=train.checkpoints_url)
    return adopt(out, checkpoints, address, retry_for_s=train.publish_timeout_s)


def _exported(request: "ExportRequest", out: Path) -> Path:
    """The file with the examples: that of an unfinished or finished job as it is, else written now.

    Raises UsageError if the file exists and is not an export of the same rollouts.
    """
    path = request.out
    if not path.exists():
        run_export(request)
        return path
    begun = out.exists() or out.with_name(f"{out.name}.unfinished").exists()
    try:
        known = json.loads(path.with_name(f"{path.name}.manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    asked = {
        "kind": request.kind,
        "run_id": request.run_id,
        "round": request.round,
        "min_reward": request.min_reward,
        "all": request.take_all,
        "agents": sorted(request.agents),
        "decoded_with": request.decoder.model if request.decoder else None,
    }
    if known.get("source") != request.source() or any(known.get(key) != value for key, value in asked.items()):
        raise UsageError(f"{path} exists: train on it with --data {path}, or remove it to export again")
    if not begun:
        path.unlink()
        run_export(request)
    return path


def _stored_prompts(request: "ExportRequest", model: str | None) -> "tuple[StoredPrompt, ...]":
    """Those of the same stores and agents that a server with this model had; none if no model is named."""
    from trainspan_processing.export.served_prompts import read_served_prompts
    from trainspan_processing.traces.trace_index import Clock
    from trainspan_training.model.loading import find_model
    from trainspan_training.sft.data.served import StoredPrompt

    if not model or (base := base_digest(find_model(model).resolve())) is None:
        return ()
    clock = Clock(time.time_ns, time.sleep)
    prompts = []
    for served in read_served_prompts(request.stores, base, request.agents, clock, request.settings.settle_s):
        with contextlib.suppress(TypeError, ValueError):  # its record is no request
            name = f"call {served.call_index} of rollout {served.rollout_id}"
            prompts.append(StoredPrompt.of(name, served.messages, served.tools, served.prompt_ids))
    return tuple(prompts)


class _Lines:
    """Prints events for people: the data, every evaluation, and of the steps about twenty, and one every ten seconds."""

    def __init__(self) -> None:
        self._shown_at = time.monotonic()

    def __call__(self, event: FineTuneStarted | FineTuneStep | FineTuneEvaluated) -> None:
        match event:
            case FineTuneStarted():
                for line in _start_lines(event):
                    print(line, flush=True)
            case FineTuneEvaluated():
                print(f"step {event.step} of {event.steps}: held-out loss {event.eval_loss:.4f}", flush=True)
            case FineTuneStep() if self._is_shown(event):
                self._shown_at = time.monotonic()
                print(f"{event}: loss {event.loss:.4f}, grad norm {event.grad_norm:.3f}", flush=True)

    def _is_shown(self, event: FineTuneStep) -> bool:
        is_late = time.monotonic() - self._shown_at > _SHOWN_EVERY_S
        return is_late or event.step % max(1, event.steps // 20) == 0 or event.step in (1, event.steps)


def _start_lines(event: FineTuneStarted) -> Iterator[str]:
    from trainspan_training.sft.data.rendering import dropped_lines

    yield f"training on {event.device} in {event.dtype}"
    yield (
        f"{event.answers} answers of {event.examples} examples in {event.rows} rows, {event.held_out_rows} of them held out; "
        f"{event.trained_tokens} trained tokens of {event.tokens}"
    )
    yield from (f"  dropped: {line}" for line in dropped_lines(event.dropped, event.named))
    if event.rewritten:
        names = ", ".join(event.named["rewritten"])
        yield f"  {event.rewritten} answers do not continue the tokens before them, e.g. {names}"
    yield from (f"  note: {loss}" for loss in event.losses)
    if event.completed_tools:
        yield f"  tools of {event.completed_tools} examples are completed as the policy server rendered them"
    if event.differing:
        yield (
            f"  note: {event.differing} of {event.compared} stored prompts of the policy server are not those that this training makes "
            f"of the same messages: the served model will see others; {event.example}"
        )
    elif event.compared:
        yield f"  {event.compared} stored prompts of the policy server equal those that this training makes"
    if event.without_strict:
        yield (
            f"  note: the tools of {event.without_strict} examples are without `strict`, which the chat template shows: if the agent "
            "sends it and its instrumentation leaves it out, the served model will see other prompts; with a rollout of the served "
            "model in the store, its tools are taken"
        )
    again = f", continued after step {event.step}" if event.step else ""
    yield f"{event.steps} steps, learning rate {event.learning_rate:g}{again}"

"""`trainspan sft`: supervised training, the warm start."""

import json
import signal
import sys
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
from trainspan_cli.settings import ConfigOption, FormatOption, settings
from trainspan_schemas.command_events import FineTuned, event_line
from trainspan_schemas.config.load import override
from trainspan_schemas.errors import UsageError

if TYPE_CHECKING:
    from trainspan_processing.export.export import ExportRequest

__all__ = ["sft"]


@setting_options(
    "sft",
    *("model", "chat_template", "loss_on", "epochs", "max_steps", "batch_tokens", "learning_rate", "max_tokens"),
    *("too_long", "eval_fraction", "lora_result", "seed"),
)
@setting_options("model", "adapter", "lora_rank", "device", "dtype", place="of_model")
def sft(
    *,
    out: Annotated[Path, typer.Option(help="Folder of the finished model; it must not exist.")],
    data: Annotated[
        Path | None, typer.Option(help="File of `trainspan export sft`, or of messages; or a folder of *.jsonl files.")
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option(help="Instead: a store, as a path or grpc:// address; may be repeated.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Instead: the folder or URL of a dataset, or a folder of datasets.")
    ] = None,
    run: RunOption = None,
    round: RoundOption = None,
    min_reward: MinRewardOption = None,
    all: AllOption = False,
    agent: AgentOption = None,
    form: FormOption = "chat",
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="Make the result the next version of these checkpoints, and swap it in ([train] policy_url)."
        ),
    ] = None,
    policy_url: Annotated[
        str | None, typer.Option(help="Policy server to swap it in [default: train.policy_url].")
    ] = None,
    given: Given,
    of_model: Given,
    format: FormatOption = "table",
    config: ConfigOption = None,
) -> int:
    """Train a model on stored or exported conversations; `serve`, `train` and `loop` start from the result.

    Stopped or killed, the same command continues. From a store, the examples are written to OUT.jsonl first.

    Example: trainspan sft --store .trainspan/spans.duckdb --min-reward 1 --model Qwen/Qwen3-0.6B --out warm
    """
    if format not in ("table", "json"):
        raise UsageError(f"--format {format!r} is unknown: use table or json")
    if (data is None) == (store is None and dataset is None):
        raise UsageError("name either --data, or --store or --dataset")
    if dataset is not None and Path(dataset).is_file():
        raise UsageError(
            f"--dataset {dataset} is a file, no folder of a dataset: name a store with --store, examples with --data"
        )
    chosen = settings(config)
    section = override(chosen.sft, **given, **of_model)
    section = override(section, model=section.model or chosen.train.model)

    from trainspan_training.sft.job import SftJob, fine_tune
    from trainspan_training.sft.options import check

    check(section)
    if data is None:
        request = export_request(
            *("sft", dataset, store or (), out.with_name(f"{out.name}.jsonl"), chosen),
            run=run,
            round=round,
            min_reward=min_reward,
            take_all=all,
            agents=agent,
            form=form,
            model=section.model,
        )
        data = _exported(request, out)
    elif unused := _given(run=run, round=round, min_reward=min_reward, all=all, agent=agent, form=form != "chat"):
        raise UsageError(f"{', '.join(unused)} choose rollouts of a store or a dataset, and --data is a file")
    done = fine_tune(SftJob(section, data, out), _print_json if format == "json" else _Lines().print_event)
    if done.signal is not None:
        name = signal.Signals(done.signal).name
        print(
            f"trainspan: stopped by {name} after {done.done} of {done.steps or '?'} steps; the same command continues",
            file=sys.stderr,
        )
        return 128 + done.signal
    version = None
    if checkpoints is not None:
        from trainspan_training.adoption import adopt
        from trainspan_training.checkpoints.swap_request import PolicyAddress

        address = PolicyAddress(policy_url or chosen.train.policy_url)
        version = adopt(out, checkpoints, address, retry_for_s=chosen.train.publish_timeout_s)
    if format == "json":
        print(event_line(FineTuned(str(out), done.steps == 0, version, done.manifest or {})), flush=True)
    else:
        print(f"{out} {'was complete already' if done.steps == 0 else 'is complete'}: trainspan serve {out}")
        if version is not None:
            print(f"it is version {version} in {checkpoints}")
    return 0


def _given(**options: object) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name, value in options.items() if value not in (None, False)]


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


def _print_json(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


class _Lines:
    """Prints the events for people: the data, every evaluation, and about twenty of the steps."""

    def print_event(self, event: dict[str, Any]) -> None:
        getattr(self, f"_{event['event']}")(event)

    @staticmethod
    def _start(event: dict[str, Any]) -> None:
        from trainspan_training.sft.data.rendering import dropped_lines

        print(f"training on {event['device']} in {event['dtype']}")
        print(
            f"{event['answers']} answers of {event['examples']} examples in {event['rows']} rows, "
            f"{event['held_out_rows']} of them held out; {event['trained_tokens']} trained tokens of {event['tokens']}"
        )
        for line in dropped_lines(event["dropped"], event["named"]):
            print(f"  dropped: {line}")
        for name, what in (("cut", "are cut at the end"), ("rewritten", "do not continue the tokens before them")):
            if event[name]:
                print(f"  {event[name]} answers {what}, e.g. {', '.join(event['named'][name])}")
        again = f", continued after step {event['step']}" if event["step"] else ""
        print(
            f"{event['steps']} steps of about {event['batch_tokens']} tokens, learning rate {event['learning_rate']:g}{again}",
            flush=True,
        )

    @staticmethod
    def _step(event: dict[str, Any]) -> None:
        step, steps = event["step"], event["steps"]
        if step % max(1, steps // 20) == 0 or step in (1, steps):
            print(
                f"step {step} of {steps}: loss {event['loss']:.4f}, grad norm {event['grad_norm']:.3f}, "
                f"{event['forwarded_tokens'] / event['seconds']:.0f} tokens/s",
                flush=True,
            )

    @staticmethod
    def _evaluation(event: dict[str, Any]) -> None:
        print(f"step {event['step']} of {event['steps']}: held-out loss {event['held_out_loss']:.4f}", flush=True)

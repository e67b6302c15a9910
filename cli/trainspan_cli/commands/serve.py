"""`trainspan serve`: the policy server."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainspan_cli.settings import ConfigOption, FormatOption, settings
from trainspan_schemas.config import override
from trainspan_schemas.settings import DEFAULT_LORA_RANK, Settings

COMMAND_OPTIONS = {"context_settings": {"allow_extra_args": True}}


def serve(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL_DIR", help="Model directory [default: the newest checkpoint].")
    ] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="Folder of checkpoints that may be swapped in.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any free one [default: 8000].")] = None,
    collector: Annotated[str | None, typer.Option(help='OTLP/gRPC URL for call spans, or "none".')] = None,
    served_name: Annotated[str | None, typer.Option(help="Model name that clients use [default: policy].")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Weights' dtype [default: float32 on CPU, bfloat16 on GPU].")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context length in tokens.")] = None,
    max_lora_rank: Annotated[int | None, typer.Option(help="Serve LoRA adapters up to this rank.")] = None,
    sleep: Annotated[
        bool, typer.Option("--sleep", help="Let a trainer on the same GPU put the server to sleep meanwhile.")
    ] = False,
    train_sampling: Annotated[
        bool, typer.Option("--train-sampling", help="Sample training rollouts at temperature 1, nothing truncated.")
    ] = False,
    val_temperature: Annotated[
        float | None, typer.Option(help="Sample validation rollouts at this temperature, nothing truncated; 0: greedy.")
    ] = None,
    config: ConfigOption = None,
    format_: FormatOption = "table",
) -> int:
    """Serve the policy with vLLM: OpenAI API, token-exact capture of every call, hot swap of the weights.

    Flags after `--` go to vLLM.

    Example: trainspan serve ./my-model --port 8000 -- --max-num-seqs 64
    """
    from trainspan_serving.process.launch import serve as run

    flags: list[str] = list(context.args)
    if model is not None and model.startswith("-"):  # `serve -- --flag`: the first flag stands where the model would
        flags.insert(0, model)
        model = None
    loaded = settings(config)
    section = override(
        loaded.serving,
        model=model,
        checkpoints=str(checkpoints) if checkpoints else None,
        host=host,
        port=port,
        collector=collector,
        served_name=served_name,
        dtype=dtype,
        max_model_len=max_model_len,
        max_lora_rank=max_lora_rank or _served_lora_rank(loaded),
        sleep=sleep or None,
        train_sampling=train_sampling or None,
        val_temperature=val_temperature,
    )

    def announce(url: str, version: int) -> None:
        if format_ == "json":
            print(json.dumps({"event": "ready", "url": url, "version": version}), flush=True)
        else:
            print(f"serving policy version {version} at {url}", flush=True)

    return run(section, flags, store=loaded.collector.store, on_ready=announce)


def _served_lora_rank(settings: Settings) -> int | None:
    """A server beside a trainer of adapters takes these adapters."""
    trained = (settings.train.lora_rank or DEFAULT_LORA_RANK) if settings.train.adapter == "lora" else None
    return settings.serving.max_lora_rank or trained

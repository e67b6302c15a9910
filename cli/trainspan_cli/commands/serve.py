"""`trainspan serve`: the policy server."""

import dataclasses
from typing import Annotated

import typer

from trainspan_cli.setting_options import Given, help_of, setting_options
from trainspan_cli.settings import ConfigOption, Format, FormatOption, settings
from trainspan_loop.addresses import check_collector
from trainspan_schemas.command_events import Ready, event_line
from trainspan_schemas.config.load import override
from trainspan_schemas.config.policies import agents_of_policies
from trainspan_schemas.config.policy_scope import check_policies, trained_lora_rank
from trainspan_schemas.config.settings import Settings

COMMAND_OPTIONS = {"context_settings": {"allow_extra_args": True}}


@setting_options(
    "serving",
    *(
        "checkpoints",
        "checkpoints_url",
        "host",
        "port",
        "collector",
        "served_name",
        "device",
        "dtype",
        "max_model_len",
        "max_lora_rank",
    ),
    *("merge_adapters", "sleep", "train_sampling", "val_temperature"),
)
def serve(
    *,
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL_DIR", help=help_of("serving", "model"))] = None,
    given: Given,
    config: ConfigOption = None,
    format_: FormatOption = Format.TABLE,
) -> int:
    """Serve the policy with vLLM: OpenAI API, token-exact capture of every call, hot swap of the weights.

    Flags after `--` go to vLLM.

    Example: trainspan serve ./my-model --port 8000 -- --max-num-seqs 64
    """
    from trainspan_serving.process.launch import serve as run

    flags: list[str] = list(context.args)
    if model is not None and model.startswith("-"):  # `serve -- --flag`: the first flag is parsed as the model
        flags.insert(0, model)
        model = None
    loaded = settings(config)
    given["max_lora_rank"] = given["max_lora_rank"] or _served_lora_rank(loaded)
    section = override(loaded.serving, model=model, **given)
    check_policies(dataclasses.replace(loaded, serving=section))
    if section.collector != "none":
        check_collector(loaded, section.collector)

    where = {}

    def started(device: str) -> None:
        where["device"] = device
        if format_ != "json":
            print(f"starting vLLM on {device}", flush=True)

    def ready(url: str, version: int) -> None:
        if format_ == "json":
            print(event_line(Ready(url, version, where["device"])), flush=True)
        else:
            print(f"serving policy version {version} at {url}", flush=True)

    policies = agents_of_policies(loaded.policies)
    return run(section, flags, store=loaded.collector.store, policies=policies, on_start=started, on_ready=ready)


def _served_lora_rank(settings: Settings) -> int | None:
    """The rank of the adapters to serve: the setting's, or the highest of those that are trained."""
    return settings.serving.max_lora_rank or trained_lora_rank(settings)

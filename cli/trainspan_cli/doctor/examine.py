"""All findings of `trainspan doctor`: what is installed, what runs, what is stored, and the chat template."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from trainspan_cli.doctor.capture_checks import stored_findings
from trainspan_cli.doctor.chat_template import (
    keeps_later_system_messages,
    left_out,
    merge_ratios,
    model_template,
    prefix_keeping_template,
)
from trainspan_cli.doctor.finding import Finding
from trainspan_cli.doctor.processes import process_findings
from trainspan_cli.extras import PARTS, ImportCheck, Part
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import pip_install
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.gpus import installed_gpus
from trainspan_schemas.home import served_model, served_template
from trainspan_schemas.telemetry.tools import TOOLS_ADVICE

__all__ = ["examine", "template_findings"]

_KEEPER = "examples/templates/later-system-messages.jinja"


def examine(settings: Settings, stores: Sequence[str], policy_url: str | None = None) -> Iterator[Finding]:
    """All findings as they are made: processes, the capture of each store (a path or a grpc:// address), installation.

    `policy_url` (with or without /v1) replaces the policy servers of the settings.
    """
    # The imports take longest and run during all other checks.
    imports = ImportCheck([part for part in PARTS if importlib.util.find_spec(part.mark)])
    yield Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")
    yield from _agent_hook()
    yield from process_findings(settings, policy_url)
    yield from template_findings(settings.serving.model or served_model(), served_template())
    for store in stores:
        for finding in stored_findings(store, settings):
            yield finding if len(stores) == 1 else replace(finding, subject=f"{finding.subject} of {store}")
    for part in PARTS:
        yield _importable(part, imports)


def _importable(part: Part, imports: ImportCheck) -> Finding:
    extra = " or ".join(part.extras)
    needs_cpu_build = "serve-cpu" in part.extras and not installed_gpus().names
    advice = pip_install("serve-cpu" if needs_cpu_build else part.extras[0])
    if part not in imports.parts:
        return Finding("note", extra, f"{part.mark} is not installed here", f"{advice} if that part is to run here")
    try:
        error = imports.error(part)
    except TimeoutError as slow:
        return Finding("note", extra, f"unknown: {slow}", "run this again when the machine is less busy")
    if error:
        return Finding("problem", extra, f"cannot be imported: {error}", advice)
    return Finding("ok", extra, "can be imported")


def _agent_hook() -> Iterator[Finding]:
    hooks = [entry.value for entry in entry_points(group="opentelemetry_pre_instrument")]
    if "trainspan._hook:install" in hooks:
        yield Finding("ok", "agent hook", "`opentelemetry-instrument` will load trainspan")
    else:
        advice = "install trainspan with pip into the agent's own environment"
        yield Finding("problem", "agent hook", "`opentelemetry-instrument` does not find trainspan here", advice)
    if os.environ.get("TRAINSPAN_DISABLED", "").lower() in ("1", "true"):
        yield Finding("problem", "agent hook", "TRAINSPAN_DISABLED is set", "unset it")
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield Finding("problem", "agent hook", "OTEL_SDK_DISABLED is set: no spans are created", "unset it")
    sampler = os.environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if sampler and not sampler.endswith("always_on"):
        detail = f"OTEL_TRACES_SAMPLER={sampler}: rollouts whose spans it drops stay unfinished"
        yield Finding("problem", "agent hook", detail, "unset it for agents whose rollouts are trained")


def template_findings(model: str | None, file: str | None = None) -> list[Finding]:
    """Whether a chat template leaves tools out or rewrites history; empty if there is none to check.

    It is that of the model directory, or the `file` with which that is served.
    """
    template_file = Path(file) if file and Path(file).is_file() else None
    loaded = model_template(Path(model), template_file) if model else None
    if model is None or loaded is None or importlib.util.find_spec("transformers") is None:
        return []
    template, special_tokens = loaded
    history = [
        *_of_history(model, template, special_tokens),
        *_of_later_system_messages(model, template, special_tokens),
    ]
    if left_out_tools := _of_tools(model, template, special_tokens):
        return [*left_out_tools, *(finding for finding in history if finding.level != "ok")]
    return history


def _of_tools(model: str, template: str, special_tokens: JsonObject) -> list[Finding]:
    if not (missing := " and ".join(left_out(template, special_tokens))):
        return []
    detail = f"of {model} leaves out {missing}: an agent's request may offer tools, its prompt does not have them"
    return [Finding("note", "chat template", detail, f"for an agent with tools, {TOOLS_ADVICE}")]


def _of_history(model: str, template: str, special_tokens: JsonObject) -> list[Finding]:
    ratios = merge_ratios(template, special_tokens)
    if not ratios:
        return []
    merged = _ratios(ratios)
    if min(ratios.values()) == 1.0:
        return [Finding("ok", "chat template", f"keeps history: {merged}")]
    detail = f"of {model} rewrites earlier answers, so that calls do not merge and tokens are forwarded several times: {merged}"
    keeper = prefix_keeping_template(template)
    better = merge_ratios(keeper.read_text(encoding="utf-8"), special_tokens) if keeper else {}
    if better and sum(better.values()) > sum(ratios.values()):
        advice = (
            f"with a prefix-keeping one it is {_ratios(better)}: trainspan serve {model} -- --chat-template {keeper}"
        )
    else:
        advice = "write one that leaves earlier answers as they are, and serve with `-- --chat-template FILE`"
    return [Finding("note", "chat template", detail, advice)]


def _of_later_system_messages(model: str, template: str, special_tokens: JsonObject) -> list[Finding]:
    if keeps_later_system_messages(template, special_tokens):
        return []
    detail = (
        f"of {model} takes a system message only at the beginning: the server merges those that an agent sends later over "
        "/v1/messages (Claude Code's reminders) into the first, so that the call does not continue the one before"
    )
    keeper = Path(__file__).parents[3] / _KEEPER  # in a checkout
    if keeper.is_file() and not keeps_later_system_messages(
        keeper.read_text(encoding="utf-8") + template, special_tokens
    ):
        advice = (
            "its roles must take turns, so no system message can come later: such an agent's calls are forwarded again"
        )
    else:
        advice = f"for such an agent, put {_KEEPER} before it"
    return [Finding("note", "chat template", detail, advice)]


def _ratios(ratios: dict[str, float]) -> str:
    return "merge ratio " + ", ".join(f"{ratio:.2f} over {name}" for name, ratio in ratios.items())

"""Turns settings into a running server: chooses weights, flags and environment, and checks the preconditions.

vLLM is not imported here: a wrong path or a port in use is reported in one line at once, not after half a minute.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from trainspan_schemas.artifacts.checkpoint import read_latest
from trainspan_schemas.config.settings import ServingSettings
from trainspan_schemas.errors import CheckpointError, ProcessError, UsageError, pip_install
from trainspan_schemas.files.objects import Objects, check_url
from trainspan_schemas.home import checkpoints_dir, remember_server, served_url
from trainspan_schemas.ports import Listener, blocked, free_port
from trainspan_schemas.resources import available_cores
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.web_origins import dialed_host
from trainspan_serving.checkpoints.adapters import SERVED_MODULES, check_adapter_fits, is_adapter, read_adapter
from trainspan_serving.checkpoints.copies import claim_copies
from trainspan_serving.checkpoints.weights import has_tokenizer, read_weights
from trainspan_serving.process.device import SHARE_BESIDE_TRAINER, ServerDevice, choose_device, last_value
from trainspan_serving.process.replicas import refuse_replicas, replicas_of
from trainspan_serving.process.server_plan import PolicyPlan, ServerPlan, make_plan, plan_policies, version_of
from trainspan_serving.process.supervisor import Supervisor

__all__ = ["Launch", "prepare", "serve"]

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

_HTTP = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75"}
"""Seconds, more than clients and balancers keep an idle connection: with vLLM's 5, as many as httpx, one that the server closes
just then costs a request."""
_PRIVATE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_CPU = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Startup takes a third of the time, and the first request with log-probabilities compiles nothing. Not for GPUs.

A waiting thread sleeps: one that spins takes the core of the trainer, the agents and its own peers."""
_SMALL_MODEL_BYTES = 64 * 2**20
"""A smaller model's layers are not worth dividing among threads."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything the supervisor needs to start and restart the server."""

    plan: ServerPlan
    host: str
    port: int
    flags: tuple[str, ...]
    """vLLM's flags, without the model."""
    environment: Mapping[str, str]
    device: str
    """Where it computes, in which dtype and with how much of a GPU's memory, in words."""


def serve(
    settings: ServingSettings,
    flags: Sequence[str] = (),
    *,
    store: str | None = None,
    policies: Mapping[str, tuple[str, ...]] | None = None,
    on_start: Callable[[str], None] = lambda device: None,
    on_ready: Callable[[str, int], None] = lambda url, version: None,
) -> int:
    """Serves until SIGTERM or SIGINT; returns 0 after a clean stop.

    `flags` go to vLLM after ours, so they win; `store` is the collector's (see ServerPlan). `policies` are served side by
    side as adapters, each for its agents (name → agents).
    `on_start` gets device, dtype and share of memory, in words, before vLLM starts;
    `on_ready(base URL, policy version)` is called at each start and restart.
    Raises CheckpointError, UsageError or ProcessError before vLLM starts, ProcessError if it does not stay up.
    """
    launch = prepare(settings, flags, os.environ, store, policies)
    template = last_value(launch.flags, "--chat-template")
    remember_server(launch.plan.model, f"http://{dialed_host(launch.host)}:{launch.port}", template)
    on_start(launch.device)
    return Supervisor(launch.plan, launch.host, launch.port, launch.flags, launch.environment, on_ready).run()


def prepare(
    settings: ServingSettings,
    flags: Sequence[str],
    environ: Mapping[str, str],
    store: str | None = None,
    policies: Mapping[str, tuple[str, ...]] | None = None,
) -> Launch:
    """Checks everything that can be checked without vLLM, and builds flags and environment.

    Raises CheckpointError, ConfigError, UsageError or ProcessError.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ProcessError(f"serve needs vLLM: {pip_install('serve-cpu')}, or its extra 'serve' on a GPU")
    refuse_replicas(*replicas_of(flags, environ))
    if settings.collector != "none":
        Collectors.of(settings.collector)
    chosen = _choose_model(settings, policies or {})
    if settings.checkpoints_url:  # what cannot be copied is refused before vLLM starts
        Objects(check_url(settings.checkpoints_url)).check()
        os.close(claim_copies(checkpoints_dir(settings.checkpoints)))
    adapter = read_adapter(Path(chosen)) if Path(chosen).is_dir() and is_adapter(Path(chosen)) else None
    model = adapter.base if adapter else chosen
    is_local = Path(model).is_dir()
    if not is_local and (Path(model).parent.is_dir() or not _HUB_ID.fullmatch(model)):
        of = f", the base of adapter {chosen}" if adapter else ""
        raise CheckpointError(
            f"no model directory {model}{of}: name one that exists, or a Hugging Face id (owner/name)"
        )
    if is_local:
        _check_model(Path(model))
    version_ = version_of(adapter.folder if adapter else Path(model))
    port = _check_port(settings.host, settings.port)
    if policies and adapter:
        raise CheckpointError(f"{adapter.folder} is an adapter: name the base model of the policies")
    planned = plan_policies(policies or {}, checkpoints_dir(settings.checkpoints), version_)
    device = choose_device(settings, flags, environ, is_cpu_build=_is_cpu_build())
    on_cpu = device.is_cpu
    merges = _merges_adapters(settings, on_cpu, flags, planned)
    settings = replace(settings, merge_adapters=merges)
    folder = adapter.folder if adapter else None
    plan = make_plan(settings, model, folder, version_, settings.port, environ, store, planned)
    defaults = {**_PRIVATE, **(_CPU if on_cpu else {}), "VLLM_LOGGING_LEVEL": "WARNING", **_HTTP}
    if on_cpu:
        small = is_local and _weight_bytes(Path(model)) < _SMALL_MODEL_BYTES
        defaults["OMP_NUM_THREADS"] = "1" if small else str(available_cores())
    if is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    if not settings.strict_tools:
        defaults["VLLM_ENFORCE_STRICT_TOOL_CALLING"] = "0"
    ranks = _check_bases(Path(model), planned) if is_local else []
    max_rank = settings.max_lora_rank or (adapter.rank if adapter else max(ranks, default=None))
    our_flags = _flags(settings, port, device, None if merges else max_rank, tuple(planned))
    every = (*our_flags, *flags)
    return Launch(plan, settings.host, port, every, {**defaults, **environ}, device.describe(every))


def _merges_adapters(
    settings: ServingSettings, on_cpu: bool, flags: Sequence[str], policies: Mapping[str, PolicyPlan]
) -> bool:
    """Whether adapters are merged into the full weights: as set, else if that is faster and exact."""
    if settings.merge_adapters is not None:
        return settings.merge_adapters
    return on_cpu and _dtype(settings, on_cpu) == "float32" and not policies and "--enable-lora" not in flags


def _dtype(settings: ServingSettings, on_cpu: bool) -> str:
    return settings.dtype or ("float32" if on_cpu else "bfloat16")


def _choose_model(settings: ServingSettings, policies: Iterable[str]) -> str:
    if settings.model is not None:
        return settings.model
    checkpoints = checkpoints_dir(settings.checkpoints)
    for policy in policies:
        if (adapter := read_latest(checkpoints / policy)) is not None:
            return read_adapter(adapter).base
    latest = read_latest(checkpoints)
    if latest is None:
        raise UsageError(f"no model: name a MODEL_DIR; there is no checkpoint in {checkpoints} yet")
    return str(latest)


def _check_bases(model: Path, policies: Mapping[str, PolicyPlan]) -> list[int]:
    """Returns the ranks of the policies' adapters. Raises CheckpointError if one does not fit the model."""
    adapters = [read_adapter(Path(policy.adapter)) for policy in policies.values() if policy.adapter]
    served = read_weights(model.resolve()) if adapters else None
    for adapter in adapters:
        assert served is not None
        check_adapter_fits(adapter, served, adapter.rank, None)
    return [adapter.rank for adapter in adapters]


def _check_model(folder: Path) -> None:
    """Raises CheckpointError if vLLM could not serve a folder of full weights."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: it is not a model directory")
    if not has_tokenizer(folder):
        raise CheckpointError(f"{folder} has no tokenizer: save one there (tokenizer.save_pretrained)")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no *.safetensors file")


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _check_port(host: str, port: int) -> int:
    """Returns the port, which must be free; for 0, that of the last server if it is free, else any free one."""
    if trouble := blocked([Listener("--port", host, port)]):
        raise ProcessError(f"{trouble}: stop that, or choose another with --port")
    return port or free_port(host, urlsplit(served_url() or "").port or 0)


def _is_cpu_build() -> bool:
    try:
        return "+cpu" in version("vllm")
    except PackageNotFoundError:
        return True


def _flags(
    settings: ServingSettings, port: int, device: ServerDevice, max_lora_rank: int | None, policies: Sequence[str]
) -> tuple[str, ...]:
    flags = ["--host", settings.host, "--port", str(port), "--served-model-name"]
    flags += [settings.served_name, *policies]
    flags += [
        "--dtype",
        _dtype(settings, device.is_cpu),
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
    ]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--api-server-count", "1"]
    flags += ["--middleware", "trainspan_serving.middleware.PolicyMiddleware"]
    flags += ["--worker-extension-cls", "trainspan_serving.worker.PolicyWorker"]
    flags += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    if device.leaves_room:
        flags += ["--gpu-memory-utilization", SHARE_BESIDE_TRAINER]
    if device.is_cpu:
        flags += ["--distributed-executor-backend", "uni", "--enforce-eager"]
        # Prompts are cached by whole blocks; vLLM's CPU default is 128 tokens.
        flags += ["--block-size", "32"]
    elif settings.sleep:
        flags += ["--enable-sleep-mode"]  # vLLM refuses it on a CPU, where there is no memory to release
    if settings.swap_in_flight:
        # With equal priorities it is first come, first served, as without; the canary must not queue behind clients.
        flags += ["--scheduling-policy", "priority"]
    if settings.max_model_len is not None:
        flags += ["--max-model-len", str(settings.max_model_len)]
    if max_lora_rank is not None:
        # Requests in flight keep the adapter they started with: a batch has those of all policies and one that is swapped.
        count = max(1, len(policies)) + 1
        flags += ["--enable-lora", "--max-lora-rank", str(_vllm_rank(max_lora_rank))]
        flags += ["--max-loras", str(count), "--max-cpu-loras", str(2 * count)]
        flags += ["--lora-target-modules", *SERVED_MODULES]
    return tuple(flags)


def _vllm_rank(rank: int) -> int:
    """Returns the smallest limit that vLLM accepts and that is at least `rank`."""
    limits = [limit for limit in _LORA_RANKS if limit >= rank]
    if not limits:
        raise UsageError(f"LoRA rank {rank} exceeds vLLM's maximum, {_LORA_RANKS[-1]}")
    return limits[0]

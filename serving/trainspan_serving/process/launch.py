"""Turns settings into a running server: chooses weights, flags and environment, and checks the preconditions.

vLLM is not imported here: a wrong path or a port in use is reported in one line at once, not after half a minute.
"""

import importlib.util
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint import read_latest
from trainspan_schemas.config.settings import ServingSettings
from trainspan_schemas.errors import CheckpointError, ProcessError, UsageError
from trainspan_schemas.home import checkpoints_dir, remember_served_model
from trainspan_serving.checkpoints.adapters import SERVED_MODULES, is_adapter, read_adapter
from trainspan_serving.checkpoints.weights import has_tokenizer
from trainspan_serving.export.collector_client import parse_endpoint
from trainspan_serving.process.replicas import refuse_replicas, replicas_of
from trainspan_serving.process.server_plan import ServerPlan, make_plan, version_of
from trainspan_serving.process.supervisor import Supervisor

__all__ = ["Launch", "prepare", "serve"]

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

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


def serve(
    settings: ServingSettings,
    flags: Sequence[str] = (),
    *,
    store: str | None = None,
    on_ready: Callable[[str, int], None] = lambda url, version: None,
) -> int:
    """Serves until SIGTERM or SIGINT; returns 0 after a clean stop.

    `flags` go to vLLM after ours, so they win; `store` is the collector's (see ServerPlan).
    `on_ready(base URL, policy version)` is called at each start and restart.
    Raises CheckpointError, UsageError or ProcessError before vLLM starts, ProcessError if it does not stay up.
    """
    launch = prepare(settings, flags, os.environ, store)
    remember_served_model(launch.plan.model)
    return Supervisor(launch.plan, launch.host, launch.port, launch.flags, launch.environment, on_ready).run()


def prepare(
    settings: ServingSettings, flags: Sequence[str], environ: Mapping[str, str], store: str | None = None
) -> Launch:
    """Checks everything that can be checked without vLLM, and builds flags and environment.

    Raises CheckpointError, ConfigError, UsageError or ProcessError.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ProcessError("serve needs vLLM: pip install 'trainspan[serve-cpu]', or 'trainspan[serve]' on a GPU")
    refuse_replicas(*replicas_of(flags, environ))
    if settings.collector != "none":
        parse_endpoint(settings.collector)
    chosen = _choose_model(settings)
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
    plan = make_plan(settings, model, adapter.folder if adapter else None, version_, port, environ, store)
    on_cpu = _is_cpu_build()
    defaults = {**_PRIVATE, **(_CPU if on_cpu else {}), "VLLM_LOGGING_LEVEL": "WARNING"}
    if on_cpu:
        small = is_local and _weight_bytes(Path(model)) < _SMALL_MODEL_BYTES
        defaults["OMP_NUM_THREADS"] = "1" if small else str(len(os.sched_getaffinity(0)))
    if is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    if not settings.strict_tools:
        defaults["VLLM_ENFORCE_STRICT_TOOL_CALLING"] = "0"
    max_rank = settings.max_lora_rank or (adapter.rank if adapter else None)
    our_flags = _flags(settings, port, on_cpu, max_rank)
    return Launch(plan, settings.host, port, (*our_flags, *flags), {**defaults, **environ})


def _choose_model(settings: ServingSettings) -> str:
    if settings.model is not None:
        return settings.model
    checkpoints = checkpoints_dir(settings.checkpoints)
    latest = read_latest(checkpoints)
    if latest is None:
        raise UsageError(f"no model: name a MODEL_DIR; there is no checkpoint in {checkpoints} yet")
    return str(latest)


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
    """Returns the port, which must be free; for 0, any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ProcessError(f"cannot listen on {host}:{port}: {reason}; choose another with --port") from error
        return int(probe.getsockname()[1])


def _is_cpu_build() -> bool:
    try:
        return "+cpu" in version("vllm")
    except PackageNotFoundError:
        return True


def _flags(settings: ServingSettings, port: int, on_cpu: bool, max_lora_rank: int | None) -> tuple[str, ...]:
    dtype = settings.dtype or ("float32" if on_cpu else "bfloat16")
    flags = ["--host", settings.host, "--port", str(port), "--served-model-name", settings.served_name]
    flags += ["--dtype", dtype, "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--api-server-count", "1"]
    flags += ["--middleware", "trainspan_serving.middleware.PolicyMiddleware"]
    flags += ["--worker-extension-cls", "trainspan_serving.worker.PolicyWorker"]
    flags += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    if on_cpu:
        flags += ["--distributed-executor-backend", "uni", "--enforce-eager"]
        # Prompts are cached by whole blocks; vLLM's CPU default is 128 tokens.
        flags += ["--block-size", "32"]
    elif settings.sleep:
        flags += ["--enable-sleep-mode"]  # vLLM refuses it on a CPU, where there is no memory to release
    if settings.max_model_len is not None:
        flags += ["--max-model-len", str(settings.max_model_len)]
    if max_lora_rank is not None:
        # Requests in flight keep the adapter they started with: two per batch, four in memory.
        flags += ["--enable-lora", "--max-lora-rank", str(_vllm_rank(max_lora_rank))]
        flags += ["--max-loras", "2", "--max-cpu-loras", "4", "--lora-target-modules", *SERVED_MODULES]
    return tuple(flags)


def _vllm_rank(rank: int) -> int:
    """Returns the smallest limit that vLLM accepts and that is at least `rank`."""
    limits = [limit for limit in _LORA_RANKS if limit >= rank]
    if not limits:
        raise UsageError(f"LoRA rank {rank} exceeds vLLM's maximum, {_LORA_RANKS[-1]}")
    return limits[0]

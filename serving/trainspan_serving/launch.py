"""From settings to a running server: which weights, which flags and environment, and what must be right beforehand.

vLLM is not imported here: a wrong path or a taken port is told in one line at once, not after half a minute.
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

from trainspan_schemas.checkpoint import META_FILE, CheckpointMeta, read_latest
from trainspan_schemas.errors import CheckpointError, ProcessError, UsageError
from trainspan_schemas.home import checkpoints_dir, remember_served_model, token
from trainspan_schemas.settings import ServingSettings

from .plan import ServerPlan
from .supervisor import Supervisor
from .weights import check_kind, has_tokenizer

__all__ = ["Launch", "prepare", "serve"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

_PRIVATE = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_CPU = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Ready in a third of the time, and no compilation at the first request with log-probabilities. Never on a GPU."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What the supervisor needs to start the server, again and again."""

    plan: ServerPlan
    host: str
    port: int
    flags: tuple[str, ...]
    """vLLM's flags, all but the model."""
    environment: Mapping[str, str]


def serve(
    settings: ServingSettings,
    flags: Sequence[str] = (),
    *,
    on_ready: Callable[[str, int], None] = lambda url, version: None,
) -> int:
    """Serves until SIGTERM or SIGINT; 0 after a clean stop.

    `flags` go to vLLM after ours, so they win. `on_ready(base URL, policy version)` is called at each (re)start.
    Raises CheckpointError, UsageError and ProcessError before vLLM starts, ProcessError when it does not stay up.
    """
    launch = prepare(settings, flags, os.environ)
    remember_served_model(launch.plan.model)
    return Supervisor(launch.plan, launch.host, launch.port, launch.flags, launch.environment, on_ready).run()


def prepare(settings: ServingSettings, flags: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """Checks everything that can be checked without vLLM, and fixes flags and environment."""
    if importlib.util.find_spec("vllm") is None:
        raise ProcessError("serve needs vLLM: pip install 'trainspan[serve-cpu]', or 'trainspan[serve]' on a GPU")
    model = _choose_model(settings)
    is_local = Path(model).is_dir()
    if not is_local and (Path(model).parent.is_dir() or not _HUB_ID.fullmatch(model)):
        raise CheckpointError(f"no model directory {model}: name one that exists, or a Hugging Face id (owner/name)")
    version_ = _check_model(Path(model)) if is_local else 0
    port = _check_port(settings.host, settings.port)
    plan = ServerPlan(
        model=str(Path(model).resolve()) if is_local else model,
        version=version_,
        served_name=settings.served_name,
        checkpoints=str(checkpoints_dir(settings.checkpoints).resolve()),
        host=settings.host,
        collector=None if settings.collector == "none" else settings.collector,
        otlp_headers=environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""),
        token=token(),
        train_sampling=settings.train_sampling,
        swap_timeout_s=settings.swap_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        canary_tolerance=settings.canary_tolerance,
    )
    on_cpu = _is_cpu_build()
    defaults = {**_PRIVATE, **(_CPU if on_cpu else {}), "VLLM_LOGGING_LEVEL": "WARNING"}
    if is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    return Launch(plan, settings.host, port, _flags(settings, port, on_cpu, flags), {**defaults, **environ})


def _choose_model(settings: ServingSettings) -> str:
    if settings.model is not None:
        return settings.model
    checkpoints = checkpoints_dir(settings.checkpoints)
    latest = read_latest(checkpoints)
    if latest is None:
        raise UsageError(f"no model: name a MODEL_DIR; there is no checkpoint in {checkpoints} yet")
    return str(latest)


def _check_model(folder: Path) -> int:
    """The policy version of a model folder. Raises CheckpointError where vLLM could not serve it."""
    check_kind(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: it is no model directory")
    if not has_tokenizer(folder):
        raise CheckpointError(f"{folder} has no tokenizer: save one there (tokenizer.save_pretrained)")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no *.safetensors file")
    return CheckpointMeta.read(folder).version if (folder / META_FILE).is_file() else 0


def _check_port(host: str, port: int) -> int:
    """The port, which must be free; for 0 any free one."""
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


def _flags(settings: ServingSettings, port: int, on_cpu: bool, further: Sequence[str]) -> tuple[str, ...]:
    dtype = settings.dtype or ("float32" if on_cpu else "bfloat16")
    flags = ["--host", settings.host, "--port", str(port), "--served-model-name", settings.served_name]
    flags += ["--dtype", dtype, "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--api-server-count", "1"]
    flags += ["--middleware", "trainspan_serving.middleware.PolicyMiddleware"]
    flags += ["--worker-extension-cls", "trainspan_serving.worker.PolicyWorker"]
    flags += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    if on_cpu:
        flags += ["--distributed-executor-backend", "uni", "--enforce-eager"]
    if settings.max_model_len is not None:
        flags += ["--max-model-len", str(settings.max_model_len)]
    return (*flags, *further)

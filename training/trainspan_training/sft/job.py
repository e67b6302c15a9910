"""One supervised training job: from files of conversations to a finished model."""

import hashlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainspan_schemas.artifacts.checkpoint import digest_of_model
from trainspan_schemas.config.settings import SftSettings
from trainspan_schemas.errors import CheckpointError, ConfigError, TrainingError
from trainspan_schemas.home import served_model
from trainspan_training.devices.cores import prepare_process, share_cores
from trainspan_training.devices.device import device_name, hide_gpus
from trainspan_training.model.loading import find_model
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.heavy_imports import import_training
from trainspan_training.sft.data.examples import ConversationFile, find_files, read_examples
from trainspan_training.sft.data.rendering import read_template
from trainspan_training.sft.options import check, own_names
from trainspan_training.sft.stopping import SftOutcome, Stopped, StopSignal
from trainspan_training.sft.work_folder import ABOUT, MANIFEST, WorkFolder, is_complete, work_path

__all__ = ["SftJob", "fine_tune"]

_NO_EFFECT = (
    "model",
    "chat_template",
    "save_every_s",
    "memory_gib",
    "micro_batch_tokens",
    "gradient_checkpointing",
    "device",
)
"""Settings that change the result by rounding only, or name contents that are hashed themselves."""


@dataclass(frozen=True, slots=True)
class SftJob:
    """What to train, and where to."""

    settings: SftSettings
    data: Path
    """A file of conversations, or a folder of files."""
    out: Path
    """Folder of the finished model; it must not exist, or be empty."""


def fine_tune(job: SftJob, on_event: Callable[[dict[str, Any]], None]) -> SftOutcome:
    """Runs the job, or continues it, and calls `on_event` with its figures as they come.

    A signal ends it cleanly after the current step; the same job continues from there. Raises ConfigError, DatasetError,
    NothingToTrainError, CheckpointError or TrainingError; before any heavy import if the reason can be known.
    """
    prepare_process()
    check(job.settings)
    hide_gpus(job.settings.device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingError("WORLD_SIZE is set, and sft trains in one process: start it without a launcher, on one GPU")
    stop = StopSignal()
    before = {number: signal.signal(number, stop.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with own_names():
            return _run(job, stop, on_event)
    except Stopped:
        return SftOutcome(job.out, 0, 0, stop.signal)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(job: SftJob, stop: StopSignal, on_event: Callable[[dict[str, Any]], None]) -> SftOutcome:
    settings = job.settings
    template = read_template(settings.chat_template) if settings.chat_template else None
    if template is not None and settings.lora_result == "adapter":
        raise ConfigError('sft.chat_template has no place in an adapter: set lora_result = "merged"')
    examples, sources = read_examples(find_files(job.data))
    policy = _policy(settings)
    identity = _identity(settings, sources, policy, template)

    if is_complete(job.out, identity):
        if work_path(job.out).exists():
            WorkFolder(job.out, identity).remove()  # killed after the result was renamed
        return SftOutcome(job.out, 0, 0, manifest=json.loads((job.out / ABOUT / MANIFEST).read_text()))
    import_training()
    device = device_name(settings.device)
    share_cores(1)
    from trainspan_training.sft.setup import set_up

    work = WorkFolder(job.out, identity)
    try:
        try:
            training = set_up(settings, policy, examples, work, stop, on_event, template, device)
        except BaseException:
            if work.latest() is None:
                work.remove()  # it has not begun
            raise
        return training.run(job.out, {"job": identity, "data": _described(job.data, sources)})
    finally:
        work.close()


def _policy(settings: SftSettings) -> Policy:
    """The model to start from. Raises CheckpointError."""
    model = settings.model or served_model()
    if not model:
        raise CheckpointError("no model: give --model, or start `trainspan serve MODEL_DIR`")
    folder = find_model(model).resolve()
    return Policy(folder, None, str(folder) if Path(model).is_dir() else model, 0, folder)


def _identity(
    settings: SftSettings, sources: list[ConversationFile], policy: Policy, template: str | None
) -> dict[str, Any]:
    """What determines the result, but for rounding."""
    return {
        "model": digest_of_model(policy.folder),
        "data": [source.sha256 for source in sources],
        "chat_template": hashlib.sha256(template.encode()).hexdigest() if template is not None else None,
        "settings": {name: value for name, value in asdict(settings).items() if name not in _NO_EFFECT},
    }


def _described(data: Path, sources: list[ConversationFile]) -> dict[str, Any]:
    """The files, and where `trainspan export` says that they come from."""
    files = []
    for source in sources:
        manifest_file = source.path.with_name(f"{source.path.name}.manifest.json")
        try:
            exported = json.loads(manifest_file.read_text())["source"]
        except (OSError, ValueError, KeyError, TypeError):
            exported = None
        files.append({**asdict(source), "path": str(source.path), "exported_from": exported})
    return {"path": str(data), "files": files}

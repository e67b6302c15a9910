"""One supervised training job: from files of conversations to a finished model."""

import hashlib
import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainspan_schemas.artifacts.checkpoint import digest_of_model
from trainspan_schemas.command_events import FineTuneStarted
from trainspan_schemas.config.settings import SftSettings
from trainspan_schemas.errors import CheckpointError, ConfigError, TrainingError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.home import served_model
from trainspan_training.devices.cores import prepare_process, share_cores
from trainspan_training.devices.device import device_name, hide_gpus
from trainspan_training.model.loading import find_model
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.heavy_imports import import_training
from trainspan_training.objective.options import check_model
from trainspan_training.sft.data.examples import ConversationFile, Example, Message, find_files, read_examples
from trainspan_training.sft.data.rendering import read_template
from trainspan_training.sft.data.served import StoredPrompt, with_served_tools
from trainspan_training.sft.job_folder import JobFolder, steps_of
from trainspan_training.sft.stop_signal import Stopped, StopSignal

if TYPE_CHECKING:
    from trainspan_training.sft.data.conversations import Conversations, Row
    from trainspan_training.sft.trainer import ConversationTrainer, OnEvent

__all__ = ["SftJob", "SftOutcome", "check", "fine_tune"]

_NO_EFFECT = (
    *("model", "chat_template_path", "save_steps", "device"),
    *("memory_gib", "memory_share", "micro_batch_tokens", "gradient_checkpointing"),
)
"""Settings that change the result by rounding only, or name contents that are hashed themselves."""
_PACK_TOKENS = {True: 4096, False: 512}
"""Greatest size of a pack on a GPU, and on a CPU: attention computes all pairs of its tokens."""
_POSITIVE = (
    *("num_train_epochs", "max_steps", "gradient_accumulation_steps", "learning_rate"),
    *("max_length", "eval_steps", "save_steps"),
)


@dataclass(frozen=True, slots=True)
class SftJob:
    """What to train, and where to."""

    settings: SftSettings
    data: Path
    """A file of conversations, or a folder of files."""
    out: Path
    """Folder of the finished model; it must not exist, or be empty."""
    force: bool = False
    """Train also if a whole kind of answers is dropped, or the prompts lack the tools."""
    prompts: tuple[StoredPrompt, ...] = ()
    """Those that a policy server with this model got from the same agent."""
    finish: bool = False
    """Whether to write the result from the newest state, without training further."""


@dataclass(frozen=True, slots=True)
class SftOutcome:
    """How a job ended."""

    out: Path
    steps: int
    """Of the whole job; 0 if it was complete before."""
    done: int
    """Those made so far."""
    signal: int | None = None
    """The signal that stopped it."""
    manifest: JsonObject | None = None
    """The finished model's manifest."""


def check(settings: SftSettings) -> None:
    """Raises ConfigError for a setting that is invalid, or has no effect with the others."""
    for name in _POSITIVE:
        if (value := getattr(settings, name)) is not None and not value > 0:
            raise ConfigError(f"sft.{name} = {value} must be greater than 0")
    if not 0 <= settings.eval_fraction < 1:
        raise ConfigError(f"sft.eval_fraction = {settings.eval_fraction} must be at least 0 and less than 1")
    if not settings.warmup_steps >= 0:
        raise ConfigError(f"sft.warmup_steps = {settings.warmup_steps} must not be less than 0")
    if settings.lora_result == "adapter" and settings.adapter == "none":
        raise ConfigError('sft.lora_result = "adapter" has no effect: adapter = "none" trains no adapter')
    if settings.lora_result == "adapter" and settings.chat_template_path:
        raise ConfigError('sft.chat_template_path has no place in an adapter: set lora_result = "merged"')
    check_model(settings)


def fine_tune(job: SftJob, on_event: "OnEvent") -> SftOutcome:
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
        return _run(job, stop, on_event)
    except Stopped:
        return SftOutcome(job.out, 0, 0, stop.signal)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(job: SftJob, stop: StopSignal, on_event: "OnEvent") -> SftOutcome:
    settings = job.settings
    template = read_template(settings.chat_template_path) if settings.chat_template_path else None
    examples, sources = read_examples(find_files(job.data))
    examples, completed = with_served_tools(examples, job.prompts)
    policy = _policy(settings)
    identity = _identity(settings, sources, policy, template)
    if completed:
        identity["tools"] = _digest([example.tools for example in examples])
    folder = JobFolder(job.out, identity)
    if (manifest := folder.finished()) is not None:
        return SftOutcome(job.out, 0, 0, manifest=manifest)
    if job.finish and folder.latest() is None:
        raise CheckpointError(f"--finish: {folder.path} has no saved state of this job; there is nothing to write")
    import_training()
    device = device_name(settings.device)
    share_cores(1)
    from trainspan_training.sft.result import finish

    with folder.held():
        try:
            trainer = _prepared(job, policy, examples, completed, folder, stop, on_event, template, device)
        except BaseException:
            if folder.latest() is None:
                folder.remove()  # it has not begun
            raise
        state = folder.latest()
        if state is not None and (job.finish or (settings.max_steps or math.inf) <= steps_of(state)):
            trainer.restore(state)
        else:
            try:
                with stop.working():
                    trainer.run(settings.eval_steps, state)
            except OSError as error:
                raise TrainingError(f"cannot save in {folder.path}: {error}; run it again to continue") from error
            if trainer.state.global_step < trainer.state.max_steps:
                return SftOutcome(job.out, trainer.state.max_steps, trainer.state.global_step, stop.signal)
        steps, done = trainer.state.max_steps, trainer.state.global_step
        about = {"job": folder.identity, "data": _described(job.data, sources), "base": policy.base}
        manifest = finish(trainer, folder, settings, policy, template, about)
    return SftOutcome(job.out, steps, done, manifest=manifest)


def _prepared(
    job: SftJob,
    policy: Policy,
    examples: Sequence[Example],
    completed: int,
    folder: JobFolder,
    stop: StopSignal,
    on_event: "OnEvent",
    template: str | None,
    device: str,
) -> "ConversationTrainer":
    """The trainer with its rows and model.

    Raises NothingToTrainError if no answer can be trained, DatasetError, ConfigError, CheckpointError or TrainingError.
    """
    import torch

    from trainspan_training.devices.team import Team
    from trainspan_training.model.kernels import accelerate_layers
    from trainspan_training.model.loading import load_config, load_model, load_tokenizer
    from trainspan_training.model.lora import add_adapter
    from trainspan_training.objective import memory
    from trainspan_training.objective.options import compute_dtype
    from trainspan_training.sft.data.conversations import hold_out
    from trainspan_training.sft.data.rows import check_rows, read_rows
    from trainspan_training.sft.trainer import ConversationTrainer, Progress, packs_exactly, sft_config

    cuda = torch.cuda.is_available()
    if cuda and (devices := torch.cuda.device_count()) > 1:
        raise TrainingError(f"{devices} GPUs are visible, and sft trains on one: set CUDA_VISIBLE_DEVICES")
    settings = job.settings
    config, tokenizer = load_config(policy.model), load_tokenizer(policy.model)
    conversations = read_rows(
        settings, config, policy.model, tokenizer, examples, template, force=job.force, prompts=job.prompts
    )
    budget = memory.fit(config, settings, memory.available(settings, cuda=cuda), cuda=cuda, team=Team())
    vocabulary = int(config.get_text_config().vocab_size)
    check_rows(conversations.rows, vocabulary, budget.longest)
    dtype = compute_dtype(settings, cuda=cuda)
    model = load_model(policy.model, frozen=settings.adapter == "lora" and dtype == "bfloat16")
    longest = max(len(row.tokens) for row in conversations.rows)
    pack = 0
    if settings.forward != "padded" and packs_exactly(model, vocabulary):
        pack = max(longest, min(_PACK_TOKENS[cuda], budget.tokens))
    elif settings.forward in ("packed", "tree"):
        raise ConfigError(
            f'model.forward = "{settings.forward}" cannot be used: the model mixes packed rows; leave it out'
        )
    pack = folder.remember("pack_tokens", pack)
    if cuda:
        accelerate_layers(model, bf16=dtype == "bfloat16")
    if settings.adapter == "lora":
        model = add_adapter(model, settings, policy)
    rows, held_out = hold_out(conversations.rows, settings.eval_fraction, settings.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    recompute = budget.kept < max(pack, longest)
    args = sft_config(settings, rows, parameters, folder.path, pack_tokens=pack, recompute=recompute)
    start = _started(conversations, rows, args, device=device, dtype=dtype, completed_tools=completed)
    progress = Progress(stop, start, on_event)
    return ConversationTrainer(model, tokenizer, args, rows, held_out, progress, logits=budget.logits)


def _started(
    conversations: "Conversations", rows: "Sequence[Row]", args: Any, *, device: str, dtype: str, completed_tools: int
) -> FineTuneStarted:
    """The event of a job that trains these `rows` with TRL's `args`."""
    return FineTuneStarted(
        device=device,
        dtype=dtype,
        examples=conversations.examples,
        answers=conversations.answers,
        rows=len(conversations.rows),
        held_out_rows=len(conversations.rows) - len(rows),
        tokens=sum(len(row.tokens) for row in rows),
        trained_tokens=sum(row.n_trained for row in rows),
        rewritten=conversations.rewritten,
        losses=conversations.systematic_losses(),
        completed_tools=completed_tools,
        **asdict(conversations.comparison),
        dropped=dict(conversations.dropped.most_common()),
        named=conversations.named,
        learning_rate=args.learning_rate,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )


def _policy(settings: SftSettings) -> Policy:
    """The model to start from. Raises CheckpointError."""
    model = settings.model or served_model()
    if not model:
        raise CheckpointError("no model: give --model, or start `trainspan serve MODEL_DIR`")
    folder = find_model(model).resolve()
    return Policy(folder, None, str(folder) if Path(model).is_dir() else model, 0, folder)


def _identity(
    settings: SftSettings, sources: list[ConversationFile], policy: Policy, template: str | None
) -> JsonObject:
    """What determines the result, but for rounding."""
    return {
        "model": digest_of_model(policy.folder),
        "data": [source.sha256 for source in sources],
        "chat_template": hashlib.sha256(template.encode()).hexdigest() if template is not None else None,
        "settings": {name: value for name, value in asdict(settings).items() if name not in _NO_EFFECT},
    }


def _digest(tools: Sequence[Sequence[Message]]) -> str:
    return hashlib.sha256(json.dumps(tools).encode()).hexdigest()


def _described(data: Path, sources: list[ConversationFile]) -> dict[str, object]:
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

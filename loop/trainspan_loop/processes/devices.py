"""The devices of a run's policy server and trainers, and the launcher of a trainer on several devices."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from trainspan_schemas.config.settings import LoopSettings
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.gpus import VISIBLE, VISIBLE_AMD, Gpus, visible_gpus
from trainspan_serving.process.device import SHARE_BESIDE_TRAINER

__all__ = ["Devices", "TrainerDevices"]

_MODULES = {"accelerate launch": "accelerate.commands.launch", "torchrun": "torch.distributed.run"}


@dataclass(frozen=True, slots=True)
class TrainerDevices:
    """Those of one of several trainers."""

    devices: tuple[str, ...]
    launcher: tuple[str, ...]
    """The command that runs the trainer's module, without `-m` and what follows."""
    share: float
    """Its share of their free memory."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Names of GPUs as in CUDA_VISIBLE_DEVICES; empty on a machine without GPUs."""

    server: tuple[str, ...]
    trainer: tuple[str, ...]
    """Those of all trainers."""
    trainers: tuple[TrainerDevices, ...]

    @classmethod
    def of(
        cls,
        settings: LoopSettings,
        environ: Mapping[str, str],
        installed: Gpus | None = None,
        *,
        trainers: int = 1,
        has_server: bool = True,
        has_trainer: bool = True,
    ) -> "Devices":
        """The devices by the settings; by default the server has the first GPU, the trainers the others or the same one.

        If the loop has no server on a GPU, the trainers have all, and the other way around.

        Each of several trainers gets as many GPUs as the others; if that does not work out, all of them share all.

        Raises ConfigError if a device does not exist or the launch settings contradict each other.
        """
        visible = visible_gpus(environ, installed)
        server = _chosen("server_devices", settings.server_devices, visible) if has_server else ()
        trainer = _chosen("trainer_devices", settings.trainer_devices, visible) if has_trainer else ()
        if server is None:
            server = tuple(name for name in visible if name not in (trainer or ()))[:1] or visible[:1]
        if trainer is None:
            trainer = tuple(name for name in visible if name not in server) or visible[:1]
        return cls(server, trainer, _divided(settings, trainer, trainers))

    @property
    def shared(self) -> bool:
        """Whether the server and the trainer share a GPU."""
        return bool(set(self.server) & set(self.trainer))

    def server_flags(self, given: str | None) -> list[str]:
        """vLLM's flags: a server on several devices splits the model over them, one on a shared GPU limits its memory.

        The user's flags come last and take precedence.
        """
        flags = ["--tensor-parallel-size", str(len(self.server))] if len(self.server) > 1 else []
        flags += ["--gpu-memory-utilization", SHARE_BESIDE_TRAINER] if self.shared else []
        flags += shlex.split(given or "")
        return ["--", *flags] if flags else []

    @staticmethod
    def environ(environ: Mapping[str, str], devices: tuple[str, ...]) -> dict[str, str]:
        """The environment in which a process sees only these devices; unchanged if there are none."""
        if not devices:
            return dict(environ)
        names = ",".join(devices)
        return {**environ, VISIBLE: names, **({VISIBLE_AMD: names} if VISIBLE_AMD in environ else {})}


def _chosen(setting: str, text: str | None, visible: tuple[str, ...]) -> tuple[str, ...] | None:
    """The visible devices with these numbers."""
    if text is None:
        return None
    numbers = text.replace(" ", "").split(",")
    if not all(number.isdigit() for number in numbers) or len(set(numbers)) < len(numbers):
        raise ConfigError(f"loop.{setting} = {text!r} must be numbers of GPUs with commas, such as 0,1")
    missing = [number for number in numbers if int(number) >= len(visible)]
    if missing:
        known = f"the visible GPUs are 0 to {len(visible) - 1} ({VISIBLE} = {','.join(visible)})"
        raise ConfigError(
            f"loop.{setting} = {text!r} names GPU {missing[0]}, and {known if visible else 'no GPU is visible'}"
        )
    return tuple(visible[int(number)] for number in numbers)


def _divided(settings: LoopSettings, devices: tuple[str, ...], trainers: int) -> tuple[TrainerDevices, ...]:
    each, left = divmod(len(devices), trainers)
    if not each or left:
        whole = TrainerDevices(devices, _launcher(settings, len(devices)), 1 / trainers)
        return (whole,) * trainers
    parts = [devices[index * each : (index + 1) * each] for index in range(trainers)]
    return tuple(TrainerDevices(part, _launcher(settings, each), 1.0) for part in parts)


def _launcher(settings: LoopSettings, devices: int) -> tuple[str, ...]:
    processes = settings.trainer_processes
    if settings.trainer_launch is not None:
        if processes is not None:
            raise ConfigError(
                f"loop.trainer_processes = {processes} has no effect with loop.trainer_launch: set the number there"
            )
        for command, module in _MODULES.items():
            if settings.trainer_launch.startswith(command):
                rest = shlex.split(settings.trainer_launch.removeprefix(command))
                return (sys.executable, "-m", module, *rest)
        return tuple(shlex.split(settings.trainer_launch))
    if processes is not None and (processes < 1 or (devices and processes != devices)):
        raise ConfigError(
            f"loop.trainer_processes = {processes} does not fit: the trainer has {devices} GPUs, and each is one process"
            if processes >= 1
            else f"loop.trainer_processes = {processes} must be at least 1"
        )
    count = processes or devices or 1
    if count == 1:
        return (sys.executable,)
    return (sys.executable, "-m", _MODULES["torchrun"], "--standalone", "--nproc_per_node", str(count))

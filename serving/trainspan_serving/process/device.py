"""The device that the policy server computes on, and its share of a GPU's memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainspan_schemas.config.settings import ServingSettings
from trainspan_schemas.errors import ProcessError, pip_install
from trainspan_schemas.gpus import installed_gpus, visible_gpus

__all__ = ["SHARE_BESIDE_TRAINER", "ServerDevice", "choose_device", "last_value"]

SHARE_BESIDE_TRAINER: Final = "0.4"
"""The server's share of the memory of a GPU that it shares: the trainer needs three times its weights in addition to them."""
_MEMORY_FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")


@dataclass(frozen=True, slots=True)
class ServerDevice:
    """Where vLLM runs."""

    name: str
    """Such as `NVIDIA L4, driver 580.95.05`, or `the CPU`."""
    is_cpu: bool
    leaves_room: bool
    """Whether it is the only GPU, of which a trainer on this machine needs its part."""

    def describe(self, flags: Sequence[str]) -> str:
        """Device, dtype and share of memory under all of vLLM's flags."""
        text = f"{self.name} in {last_value(flags, '--dtype')}"
        share = last_value(flags, "--gpu-memory-utilization")
        return text if self.is_cpu or share is None else f"{text}, with {share} of its memory"


def choose_device(
    settings: ServingSettings, flags: Sequence[str], environ: Mapping[str, str], *, is_cpu_build: bool
) -> ServerDevice:
    """The device by `[serving] device`; this vLLM is a build for CPUs, or for GPUs.

    Raises ProcessError if it would not be used: a GPU by a build for CPUs, or by CUDA with an old driver.
    """
    installed = installed_gpus()
    visible = visible_gpus(environ, installed) if installed.names else ()
    if is_cpu_build:
        install = f"this vLLM is a build for CPUs: run `make setup` again or {pip_install('serve')}"
        if settings.device == "cuda":
            raise ProcessError(f"--device cuda, but {install}")
        if settings.device == "auto" and visible:
            raise ProcessError(f"{installed} is here, but {install}, or serve on the CPU with --device cpu")
        return ServerDevice("the CPU", is_cpu=True, leaves_room=False)
    if settings.device == "cpu":
        raise ProcessError(
            "--device cpu needs a build of vLLM for CPUs, and this one is for GPUs: "
            f"{pip_install('serve-cpu')} in another environment, or leave --device out"
        )
    if visible and installed.trouble:
        raise ProcessError(f"{installed}: {installed.trouble}")
    is_only_one = len(installed.names) == 1 and settings.checkpoints_url is None
    asked = any(last_value(flags, flag) for flag in _MEMORY_FLAGS)
    return ServerDevice(str(installed) if installed.names else "a GPU", False, is_only_one and not asked)


def last_value(flags: Sequence[str], name: str) -> str | None:
    """The value of the last flag of this name, as vLLM takes it; underscores and hyphens mean the same."""
    value = None
    for index, flag in enumerate(flags):
        head, equals, tail = flag.partition("=")
        if head.replace("_", "-") == name:
            value = tail if equals else next(iter(flags[index + 1 : index + 2]), None)
    return value

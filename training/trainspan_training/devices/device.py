"""The device that a process trains on, by `device` of the settings."""

import os

from trainspan_schemas.errors import TrainingError
from trainspan_schemas.gpus import VISIBLE, VISIBLE_AMD, Gpus, installed_gpus, visible_gpus

__all__ = ["device_name", "hide_gpus"]


def hide_gpus(device: str) -> None:
    """With `cpu`, hides all GPUs from this process; before anything asks PyTorch for one."""
    if device == "cpu":
        os.environ.update({VISIBLE: "", VISIBLE_AMD: ""})


def device_name(device: str) -> str:
    """The device that PyTorch uses here, such as `NVIDIA L4, driver 580.95.05`, or `the CPU`.

    Raises TrainingError if it does not see a GPU that is there, unless `device` is `cpu`.
    """
    import torch

    installed = installed_gpus()
    if torch.cuda.is_available():
        driver = f", driver {installed.driver}" if installed.driver else ""
        return f"{torch.cuda.get_device_name()}{driver}"
    if installed.names and visible_gpus(os.environ, installed):
        raise TrainingError(
            f"{installed} is here, but PyTorch {torch.__version__} does not see it: {_reason(installed)}; "
            "or train on the CPU with --device cpu"
        )
    if device == "cuda":
        raise TrainingError(f"--device cuda, but there is no GPU here ({VISIBLE} = {os.environ.get(VISIBLE, 'unset')})")
    return "the CPU"


def _reason(installed: Gpus) -> str:
    import torch

    if torch.version.cuda is None:
        return "it is a build for CPUs; run `make setup` again, or install torch's default build"
    if installed.trouble:
        return installed.trouble
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return f"{VISIBLE} = {os.environ.get(VISIBLE, 'unset')} names none of them"

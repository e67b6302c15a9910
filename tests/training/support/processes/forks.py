"""Runs modules like `python -m MODULE` in forks of one process that has imported everything and computed nothing.

Importing PyTorch, TRL and transformers takes 8 s of CPU, several times as long as what such a child then does.
"""

import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.training.support.processes.imported"])


@dataclass(frozen=True, slots=True)
class Done:
    """How a child ended."""

    code: int
    """Negative for a signal."""
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Fork:
    """A running child. Its output goes to files."""

    process: ForkServerProcess
    out: Path
    err: Path

    def events(self) -> list[dict[str, Any]]:
        """The JSON lines that it has printed so far."""
        *whole, _ = self.out.read_text().split("\n")
        return [json.loads(line) for line in whole]

    def wait(self, timeout_s: float) -> Done:
        """Waits for its end. Raises TimeoutError."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            raise TimeoutError(f"still running after {timeout_s:g} s: {self.err.read_text()[-3000:]}")
        return Done(self.process.exitcode, self.out.read_text(), self.err.read_text())


@contextmanager
def forked(folder: Path, module: str, *arguments: str, **environ: str) -> Iterator[Fork]:
    """A child in `folder`, with these variables added to the environment of the tests; killed at the end of the block."""
    number = len(list(folder.glob("*.out")))
    out, err = folder / f"{number}.out", folder / f"{number}.err"
    out.touch()
    err.touch()
    whole = dict(os.environ) | {"OMP_NUM_THREADS": "1"} | environ
    process = _CONTEXT.Process(target=_run, args=(folder, module, arguments, whole, out, err))
    process.start()
    try:
        yield Fork(process, out, err)
    finally:
        process.kill()
        process.join()


def run_forked(folder: Path, module: str, *arguments: str, timeout_s: float, **environ: str) -> Done:
    """Runs a child to its end. Raises TimeoutError."""
    with forked(folder, module, *arguments, **environ) as fork:
        return fork.wait(timeout_s)


def _run(folder: Path, module: str, arguments: Sequence[str], environ: Mapping[str, str], out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

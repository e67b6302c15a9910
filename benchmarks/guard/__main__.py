"""`make bench-guard`: the CPU time of each part's work, of the working tree against the last stored baseline, in pairs.

The baseline is the commit of `benchmarks/results/bench-guard.json`, which `--store` moves to the working tree's. For each
part, two processes do the same short turns alternately, one with the packages of each tree, so that whatever else the machine
does slows both alike. Since it slows turns and never speeds them up, the faster half of each side's turns is compared. A part
fails if that ratio is beyond 1.10, and its 95 % interval (bootstrap over the rounds) does not include 1.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.__main__ import commit, machine
from benchmarks.guard.turns import PARTS
from benchmarks.support.pairs import rotated

__all__ = ["PACKAGES", "compare", "is_slower", "main", "ratio"]

ROOT = Path(__file__).resolve().parents[2]
_STORED = ROOT / "benchmarks" / "results" / "bench-guard.json"
_LIMIT = 1.10
PACKAGES = (
    "schemas",
    "exporters",
    "rollouts",
    "serving",
    "collector",
    "processing",
    "viewer",
    "training",
    "loop",
    "cli",
)
_ROUNDS = 40
_FEWEST_ROUNDS = 9
_DRAWS = 400
_SECONDS = {"exporters": 25.0, "collector": 110.0, "processing": 70.0, "serving": 25.0, "training": 45.0}
"""Of turns: the more the figures of a part vary, the more."""


def compare(part: str, baseline: Path, tree: Path, rounds: int = _ROUNDS) -> list[tuple[float, float]]:
    """The CPU seconds of a turn of `baseline` and of `tree`, one pair per round."""
    pairs: list[tuple[float, float]] = []
    with _worker(part, baseline) as before, _worker(part, tree) as now:
        for worker in (before, now):
            _turn(worker)  # warms up
        began = time.monotonic()
        for number, workers in enumerate(rotated([before, now], rounds)):
            if number >= _FEWEST_ROUNDS and time.monotonic() - began > _SECONDS[part]:
                break
            took_s = {id(worker): _turn(worker) for worker in workers}
            pairs.append((took_s[id(before)], took_s[id(now)]))
    return pairs


def ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The ratio of the mean CPU time of the faster half of each side's turns, and its 95 % interval."""
    generator, n = random.Random(0), len(pairs)
    drawn = sorted(_of_faster_half(generator.choices(pairs, k=n)) for _ in range(_DRAWS))
    return _of_faster_half(pairs), drawn[_DRAWS // 40], drawn[-1 - _DRAWS // 40]


def _of_faster_half(pairs: Sequence[tuple[float, float]]) -> float:
    half = (len(pairs) + 1) // 2
    before, now = (sum(sorted(side)[:half]) for side in zip(*pairs, strict=True))
    return now / before


def is_slower(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether the ratio is beyond the limit and its interval does not include 1."""
    middle, low, _ = ratio(pairs)
    return middle > _LIMIT and low > 1


@contextlib.contextmanager
def _worker(part: str, tree: Path) -> "Iterator[subprocess.Popen[str]]":
    path = os.pathsep.join([*(str(tree / package) for package in PACKAGES), str(ROOT)])
    with tempfile.TemporaryDirectory(prefix="trainspan-guard-") as home, tempfile.TemporaryFile("w+") as messages:
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "TRAINSPAN_HOME": home,
            "OMP_NUM_THREADS": "1",
            "POLARS_MAX_THREADS": "1",
        }
        command = [sys.executable, "-m", "benchmarks.guard.turns", part]
        with subprocess.Popen(
            command,
            env=environment,
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
        ) as process:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                messages.seek(0)
                raise RuntimeError(f"{tree} cannot run the turns of {part}: {messages.read()[-2000:]}")
            yield process


def _turn(worker: "subprocess.Popen[str]") -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(file=worker.stdin, flush=True)
    return float(worker.stdout.readline())


def _unpacked(commit: str, folder: Path) -> Path:
    listing = ["git", "ls-tree", "--name-only", commit]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    packages = [package for package in PACKAGES if package in names]
    archive = subprocess.run(["git", "archive", commit, *packages], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def _stored_baseline() -> str:
    stored: str = json.loads(_STORED.read_text())["commit"]
    return stored


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each part; 1 if one of them is slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--baseline", default=_stored_baseline(), help="commit to compare with")
    parser.add_argument("--store", action="store_true", help="make the working tree's commit the next baseline")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree whose packages are measured")
    given = parser.parse_args(arguments)
    if given.store and commit().endswith("-dirty"):
        parser.error("--store needs a working tree without changes: commit them first")
    slower: list[str] = []
    figures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="trainspan-baseline-") as folder:
        baseline = _unpacked(given.baseline, Path(folder))
        print(f"CPU time against {given.baseline}", flush=True)
        for part in given.parts:
            pairs = compare(part, baseline, given.tree)
            middle, low, high = ratio(pairs)
            slower += [part] if is_slower(pairs) else []
            verdict = "SLOWER" if part in slower else "ok"
            figures[part] = f"{middle:.3f} (95 % {low:.3f} to {high:.3f}; {len(pairs)} rounds)"
            print(f"{part:<12} {figures[part]}  {verdict}", flush=True)
    if slower:
        print(f"slower than {given.baseline} by more than {_LIMIT - 1:.0%}: {', '.join(slower)}", file=sys.stderr)
    if given.store:  # whoever stores a slower one has seen by how much, and the file says it
        now = datetime.now(UTC).isoformat(timespec="seconds")
        run = {"commit": commit(), "machine": machine(), "time": now, "compared_with": given.baseline, "guard": figures}
        _STORED.write_text(json.dumps(run, indent=2) + "\n")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())

"""The pages of `trainspan view` on a store of a million calls and a dataset of 100,000 rows: time, CPU, bytes and memory.

Each page is asked for in three states: `cold`, as the first request after the viewer and the collector were started; `first`,
when other pages were shown before, but not this one; and `again`, the median of five more requests. Times are those of a client
on the same machine, from the request to the last byte of the first answer, and to the whole page if the first answer only says
that it is being made. CPU is that of the viewer and of the collector; processes that run a
reader's own SQL are only part of the time. `load_average` tells of other programs: beside them, times are too long.

The state folder is kept (support/viewer_world.py). `TRAINSPAN_BENCH_CALLS` makes a smaller one.
"""

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote, urlencode

import polars as pl

from benchmarks.support.large_store import CALLS_PER_COPY, Shape
from benchmarks.support.viewer_process import Asked, Served, collector, viewer
from benchmarks.support.viewer_world import BenchWorld, world
from trainspan_processing.credit.groups import group_id
from trainspan_processing.dataset.ledger import LEDGER, ledger_path
from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_schemas.store.roles import make_home_token_file

__all__ = ["made_world", "measure"]

_CALLS: Final = 1_044_480
_ROUNDS: Final = 10
_LONG_TOKENS: Final = 16_384
_AGAIN: Final = 5
_LIMIT_MS: Final = 300
_LIMIT_BYTES: Final = 1_000_000
_STATES: Final = ("cold", "first", "again")


def made_world() -> BenchWorld:
    """The world of these measurements."""
    calls = int(os.environ.get("TRAINSPAN_BENCH_CALLS", _CALLS))
    copies = max(1, round(calls / CALLS_PER_COPY / _ROUNDS))
    made = world(Shape(rounds=_ROUNDS, copies=copies, long_tokens=_LONG_TOKENS, long_round=5))
    os.environ["TRAINSPAN_HOME"] = str(made.home)
    make_home_token_file()
    return made


def measure() -> dict[str, Any]:
    """A line of figures for each page, what is beyond the limits, and the peaks of memory."""
    made = made_world()
    pages = _pages(made)
    load = [os.getloadavg()[0]]
    found: dict[str, dict[str, Asked]] = {name: {} for name in pages}
    for name, path in pages.items():
        with _serving(made) as served:
            found[name]["cold"] = served.ask(path)
    with _serving(made) as served:
        for path in _others(made):
            served.ask(path)
        for name, path in pages.items():
            found[name]["first"] = served.ask(path)
            found[name]["again"] = _median([served.ask(path) for _ in range(_AGAIN)])
        peaks = served.peaks_mib()
    load.append(os.getloadavg()[0])
    return {
        "calls": made.calls,
        "dataset_rows": json.loads(manifest_path(made.dataset_path).read_text())["rows"],
        **{name: _line(asked) for name, asked in found.items()},
        "over_300_ms": {
            f"{name}, {state}": round(asked[state].ms)
            for name, asked in found.items()
            for state in _STATES
            if asked[state].ms > _LIMIT_MS
        },
        "over_1_mb": {
            name: asked["first"].n_bytes for name, asked in found.items() if asked["first"].n_bytes > _LIMIT_BYTES
        },
        **peaks,
        "load_average": [round(one, 1) for one in load],
    }


@contextmanager
def _serving(made: BenchWorld) -> Iterator[Served]:
    with collector(made.store) as pid, viewer(made.home, made.store, pid) as served:
        yield served


def _pages(made: BenchWorld) -> dict[str, str]:
    """Name → address."""
    seen = _seen(made)
    large = seen.filter(pl.col("calls") == 8).group_by("task_id").agg(pl.all().first()).sort("task_id")
    rollout, other = _address(made, large.row(7, named=True)), _address(made, large.row(11, named=True))
    group, another = (_group(made, large.row(place, named=True)) for place in (17, 19))
    long = f"/rollouts/{'f' * 24}00000001?" + urlencode({"dataset": made.dataset, "attempt": 0})
    dataset = f"/datasets/{quote(made.dataset, safe=':')}"
    alone = large.row(23, named=True)["rollout_id"]
    run = f"/runs/{made.run}"
    others = sorted((path.name for path in (made.home / "runs").iterdir() if path.name != made.run), reverse=True)
    return {
        "runs": "/",
        "compare": f"/compare?run={made.run}&run={others[0]}&run={others[1]}",
        "run": run,
        "run, later rounds": f"{run}?from=400",
        "evidence": f"{run}/records/400",
        "datasets": "/datasets",
        "dataset": dataset,
        "dataset, rollouts": f"{dataset}?view=rollouts",
        "dataset, quality": f"{dataset}?view=quality",
        "dataset, diff": f"{dataset}?" + urlencode({"view": "diff", "other": f"{made.run}:round-1000"}),
        "dataset, by reward": f"{dataset}?least_reward=0.5&sort=reward&from=100",
        "dataset, by tokens": f"{dataset}?least_tokens=100&sort=tokens",
        "dataset, by reason": f"{dataset}?view=rollouts&reason=zero_spread_group",
        "dataset, by status": f"{dataset}?status=ok",
        "dataset, by text": f"{dataset}?view=rollouts&text=nine+make+nine",
        "group": group,
        "what if, group": f"{another}?credit=return_to_go&gamma=0.9",
        "rollout": rollout,
        "rollout without a dataset": f"/rollouts/{alone}",
        "rollout by the store": f"/rollouts/{alone}?dataset=none",
        "rollout by the beginning of its id": f"/rollouts/{large.row(29, named=True)['rollout_id'][:12]}",
        "what if, rollout": f"{other}&baseline=rloo",
        "what if, compared with its whole round": f"{other}&baseline=batch",
        "dataset, by agent": f"{dataset}?view=rollouts&agent=solver",
        "dataset, by finish reason": f"{dataset}?view=rollouts&finish=length",
        "run, earlier checks": f"{run}?checks_from=120",
        "labels": "/labels",
        "judges": "/judges",
        "spans": rollout.replace("?", "/spans?"),
        "tokens": rollout.replace("?", "/calls/3?"),
        "tokens, entropy": other.replace("?", "/calls/2?") + "&overlay=entropy",
        "long rollout": long,
        "long group": long.replace("?", "/group?"),
        "long tokens, mismatch": long.replace("?", "/calls/1?") + "&overlay=mismatch",
        "live": "/live",
    }


def _others(made: BenchWorld) -> list[str]:
    """Pages that are shown before: the same kinds, of other rollouts."""
    row = _seen(made).filter(pl.col("calls") == 8).row(-1, named=True)
    address = _address(made, row)
    return ["/", address, address.replace("?", "/calls/0?"), _group(made, row)]


def _seen(made: BenchWorld) -> pl.DataFrame:
    return pl.read_ndjson(ledger_path(made.dataset_path), schema=LEDGER)


def _address(made: BenchWorld, row: Mapping[str, Any]) -> str:
    return f"/rollouts/{row['rollout_id']}?" + urlencode({"dataset": made.dataset, "attempt": row["attempt"]})


def _group(made: BenchWorld, row: Mapping[str, Any]) -> str:
    return f"/groups/{quote(made.dataset, safe=':')}/{group_id(row['run_id'], row['round'], row['task_id'])}"


def _median(asked: Sequence[Asked]) -> Asked:
    """The median of each figure."""
    names = ("ms", "whole_ms", "viewer_cpu_ms", "collector_cpu_ms", "n_bytes")
    return Asked(*(statistics.median(getattr(one, name) for one in asked) for name in names))


def _line(asked: Mapping[str, Asked]) -> dict[str, Any]:
    """By state: milliseconds to the first answer, to the whole page, and of CPU in viewer + collector; kB of the page."""
    return {**{state: _figures(asked[state]) for state in _STATES}, "kb": round(asked["first"].n_bytes / 1000)}


def _figures(one: Asked) -> str:
    whole = f", whole {one.whole_ms:.0f}" if one.whole_ms > one.ms else ""
    return f"{one.ms:.0f} ms{whole} ({one.viewer_cpu_ms:.0f} + {one.collector_cpu_ms:.0f} CPU)"


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))

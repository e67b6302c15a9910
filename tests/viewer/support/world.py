"""Everything that the pages show, made by the real parts: a store, a run with a failed check, two datasets, hostile text."""

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.processing.conftest import Bench, RunningCollector
from tests.processing.support.traces import TestRollout, chain
from tests.viewer.support.trainer_figures import write_figures
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.store.roles import Role, make_home_token_file, token_of

__all__ = ["EVIL", "RUN", "SLOW_VIEW", "Answer", "Viewer", "World", "make_world", "serving"]

RUN = "20260102-030405-0a1b2c3d"
OTHER_RUN = "20260101-000000-ffffffff"
EVIL = (
    "</script></pre></textarea></title><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    " javascript:document.title='owned' \x1b]52;c;cm0=\x07 \u202egnp.exe '\"><svg onload=\"document.title='owned'\">"
)

MEGABYTES = 2_000_000
VIEW = ("-m", "trainspan_cli", "view")
SLOW_VIEW = ("-m", "tests.viewer.support.slow_view")


@dataclass(frozen=True, slots=True)
class World:
    """A state folder and a store."""

    home: Path
    bench: Bench
    store: str
    dataset: str
    """Name of the dataset of round 1."""


def make_world(collectors: list[RunningCollector], home: Path) -> World:
    """Round 1 has a group with contrast (rewards 0, 0, 1, 1), one with equal rewards, and one full of hostile text."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRAINSPAN_HOME", str(home))
        make_home_token_file()
    runs = home / "runs"
    bench = Bench(collectors, RUN, runs / RUN / "dataset")
    bench.send(
        *(_rollout(name, "mixed", reward) for name, reward in (("m0", 0.0), ("m1", 0.0), ("m2", 1.0), ("m3", 1.0))),
        *(_rollout(name, "equal", 1.0) for name in ("e0", "e1")),
        _hostile("h0", 0.25, EVIL, "x" * MEGABYTES),
        _hostile("h1", 0.75, EVIL * (MEGABYTES // len(EVIL)), "x"),
    )
    built = bench.build(round_=1)
    bench.build(round_=1, out=home / "dataset", baseline="rloo")
    _write_run(runs / RUN, target="agent.py:solve", learning_rate=1e-5, evil=EVIL)
    write_figures(runs / RUN / "checkpoints", built.path, "view-m1")
    _write_run(runs / OTHER_RUN, target="agent.py:solve", learning_rate=2e-5, evil="")
    return World(home, bench, str(collectors[0].store), f"{RUN}:round-0001")


def _rollout(name: str, task: str, reward: float) -> TestRollout:
    return chain(TestRollout(f"view-{name}", task=task, run=RUN, round=1), 2).reward(reward)


def _hostile(name: str, reward: float, text: str, attribute: str) -> TestRollout:
    rollout = TestRollout(f"view-{name}", task=EVIL, run=RUN, round=1)
    said = json.dumps([{"role": EVIL, "parts": [{"type": "text", "content": text}]}])
    client = rollout.span(
        *("client", 1.0, 2.0),
        gen_ai__operation__name="chat",
        gen_ai__input__messages=said,
        gen_ai__output__messages=said,
        long=attribute,
    )
    rollout.call(0, [1, 2, 3], [4, 5, 6], parent=client, agent=EVIL)
    return rollout.reward(reward)


def _write_run(folder: Path, *, target: str, learning_rate: float, evil: str) -> None:
    """A finished run of two rounds, as the loop writes it; in the second round a check does not hold."""
    settings = json.loads(json.dumps(_plain(Settings()), default=str))
    settings["loop"] |= {"target": target + evil, "rounds": 2}
    settings["train"]["learning_rate"] = learning_rate
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "logs" / "trainer.log").write_text(f"the last line of the log {evil}\n")
    best = {"checkpoint": "best/policy-000002", "round": 2, "policy_version": 2, **_estimate(0.75)}
    run = {"run_id": folder.name, "status": "finished", "settings": settings, "best": best}
    (folder / "run.json").write_text(json.dumps(run))
    records = [
        _validation(0, 0.25),
        _round(1, [], evil),
        _round(2, ["server and trainer agree"], evil),
        _validation(2, 0.75),
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    metrics = [
        {"round": number, "version": number, "k3": 0.01 * number, "kl": 0.02, "entropy": 1.5 / number}
        for number in (1, 2)
    ]
    (folder / "checkpoints" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))


def _plain(settings: Settings) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(settings)


def _estimate(mean: float) -> dict[str, Any]:
    return {"n": 100, "mean": mean, "deviation": 0.4, "binary": True}


def _validation(round_: int, mean: float) -> dict[str, Any]:
    checks = [{"name": "every call is stored", "ok": True, "detail": "server 100, clients 100, store 100"}]
    about = {"kind": "eval", "name": "validation", "round": round_, "policy_version": round_, "tasks": 100}
    return {**about, **_estimate(mean), "status": {"ok": 100}, "calls": 100, "seconds": 3.0, "checks": checks}


def _round(round_: int, failed: list[str], evil: str) -> dict[str, Any]:
    names = ("every call is stored", "every drop is named", "server and trainer agree")
    checks = [
        {
            "name": name,
            "ok": name not in failed,
            "detail": f"mean |Δlogp| 0.5 (limit 3e-05) {evil}" if name in failed else "fine",
        }
        for name in names
    ]
    agreement = {"mean": 0.5 if failed else 1e-5, "k3": 1e-9, "limit": 3e-5, "fresh": True}
    return {
        "kind": "round",
        "round": round_,
        "policy_version": round_,
        "skipped": None,
        "rollout": {
            "total": 8,
            "status": {"ok": 8},
            "mean_reward": 0.5 * round_,
            "sampled_tokens": 100,
            "sampling_seconds": 2.0,
        },
        "dataset": {"calls_seen": 12, "calls_kept": 8, "dropped": {"zero_spread_group": 4}},
        "train": {"version": round_, "logp_diff_mean": agreement["mean"], "agreement": agreement, "error": None},
        "seconds": {"rollouts": 2.0, "dataset": 1.0, "train": 4.0, "total": 7.0},
        "checks": checks,
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

    status: int
    text: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Viewer:
    """A running `trainspan view`."""

    url: str
    token: str
    """The reader's."""
    key: str
    """In the printed address."""
    process: subprocess.Popen[str]

    def get(self, path: str, *, authorized: bool = True, method: str = "GET", **headers: str) -> Answer:
        """One request; `headers` with underscores for hyphens."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if authorized:
            given.setdefault("authorization", f"Bearer {self.token}")
        return self._asked(urllib.request.Request(self.url + path, headers=given, method=method))

    def post(self, path: str, fields: Mapping[str, object], **headers: str) -> Answer:
        """A form as a browser sends it that has no cookie but the token."""
        given = {
            "authorization": f"Bearer {self.token}",
            "content-type": "application/x-www-form-urlencoded",
            "origin": self.url,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        body = urllib.parse.urlencode(fields).encode()
        return self._asked(urllib.request.Request(self.url + path, body, headers=given, method="POST"))

    def _asked(self, request: urllib.request.Request) -> Answer:
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=60) as answer:
                return Answer(answer.status, answer.read().decode(), {k.lower(): v for k, v in answer.headers.items()})
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode(), {k.lower(): v for k, v in error.headers.items()})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@contextmanager
def serving(
    home: Path, store: str, *arguments: str, program: Sequence[str] = VIEW, **settings: object
) -> Iterator[Viewer]:
    """Runs `trainspan view` on a free port; `settings` of `[view]` become environment variables."""
    # On a busy machine, a browser would get the page that waits, and load again while a test looks at it.
    environ = {"TRAINSPAN_VIEW__PAGE_WAIT_MS": "60000", **os.environ, "TRAINSPAN_HOME": str(home)}
    environ |= {f"TRAINSPAN_VIEW__{name.upper()}": str(value) for name, value in settings.items()}
    command = [sys.executable, *program, "--port", "0", "--store", store, *arguments]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or []), daemon=True)
    reader.start()
    try:
        line = process.stdout.readline().strip()
        assert line, "".join(errors)
        address, _, key = line.partition("?key=")
        file = home / "tokens.toml"
        token = token_of(file, Role.READER) if file.exists() else ""
        yield Viewer(address.rstrip("/").partition("/runs/")[0], token, key, process)
    finally:
        process.terminate()
        process.wait(30)
        reader.join(10)
    assert "Traceback" not in "".join(errors), "".join(errors)

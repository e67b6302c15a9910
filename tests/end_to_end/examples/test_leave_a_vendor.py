"""The example that leaves a vendor's fine-tuning: its parts, and the whole way with a model made from scratch."""

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.places import ROOT, make_place
from tests.support.ports import free_ports
from trainspan_rollouts.judges.choice import find_judge
from trainspan_rollouts.judges.judge import Result
from trainspan_rollouts.task_file import read_tasks

EXAMPLE = ROOT / "examples" / "leave_a_vendor"

sys.path.insert(0, str(EXAMPLE))
try:
    import agent
    import vendor
    from problems import conversation, expression_of, problems
finally:
    # Other tests have modules of these names.
    sys.path.remove(str(EXAMPLE))
    for name in ("agent", "problems", "vendor"):
        sys.modules.pop(name, None)


@pytest.fixture
def vendor_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), vendor.Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    agent.client.cache_clear()
    yield url
    agent.client().close()
    agent.client.cache_clear()
    server.shutdown()
    server.server_close()


def test_the_solver_understands_every_problem_and_the_splits_share_none() -> None:
    rows = list(itertools.islice(problems(0), 500))
    texts = [row["messages"][-1]["content"] for row in rows]
    assert [agent.calculate(str(expression_of(text))) for text in texts] == [row["reference_answer"] for row in rows]
    assert len(set(texts)) == 500
    assert 60 < sum(row["split"] == "val" for row in rows) < 140
    assert expression_of("What is 2+2?") is None
    assert [message["role"] for message in conversation(rows[0])["messages"]] == [
        *("system", "user", "assistant", "user", "assistant")
    ]


@pytest.mark.parametrize(
    ("expression", "result"),
    [("3*4+2", "14"), ("9-12", "-3"), ("2**9", "error"), ("exit()", "error"), ("9" * 7, "error"), ("", "error")],
)
def test_the_tool_calculates_with_whole_numbers_only(expression: str, result: str) -> None:
    assert agent.calculate(expression) == result


def test_the_agent_solves_problems_with_the_vendor_unless_it_slips(
    vendor_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in itertools.islice(problems(1), 5)))
    grade = find_judge(str(EXAMPLE / "grader.json"), 10.0).function
    for mistakes, reward in ((0.0, 1.0), (1.0, 0.0)):
        monkeypatch.setattr(vendor, "MISTAKES", mistakes)
        for task in read_tasks(path):
            verdict = grade(task.for_judge(), Result("ok", agent.solve(task.for_agent()), "", None, 1.0, "r"))
            assert (verdict if reward else verdict[0]) == reward


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_user_leaves_with_files_and_reaches_the_vendor(tmp_path: Path) -> None:
    place = make_place(tmp_path / "home")
    (vendor_port,) = free_ports(1)
    environ = place.environ | {"VENDOR_PORT": str(vendor_port), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [EXAMPLE / "run.sh"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=2300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    work = place.home / "shopping"
    manifest = json.loads((work / "warm" / "sft" / "manifest.json").read_text())
    assert manifest["examples"] == 1200  # 600 conversations with two answers each
    assert (manifest["dropped"], manifest["rewritten"]) == ({}, 0)
    (run,) = (place.home / "runs").iterdir()
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert all(check["ok"] for record in records for check in record["checks"])
    command = ["trainspan", "compare", "own", "--reference", "vendor", "--price", "vendor=2.5/10", "--format", "json"]
    with subprocess.Popen(["trainspan", "collector"], env=environ, stderr=subprocess.DEVNULL) as collector:
        compared = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
        collector.terminate()
    reference, own = json.loads(compared.stdout)
    assert 0.7 < reference["success"]["mean"] < 0.9  # two answers, each wrong one time in ten
    assert own["share"] >= 0.9
    assert own["share_interval"][0] > 0.8
    assert reference["cost_per_success"] > 0
    assert own["per_success"] > 0

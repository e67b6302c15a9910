"""Plans, CPU time, stored results and their report."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from evaluation import environments, models, provenance
from evaluation.__main__ import main, parser, plans
from evaluation.cpu_time import CpuMeter, cpu_at, cpu_seconds, noted
from evaluation.models import continued, make_untrained, rejection_sampled, steps_for, warm_started, with_success
from evaluation.plans import CONTROLS, EXAMPLES, ROOT, SCRATCH, TASKS, Plan, default_model, folder_of, pins_of
from evaluation.report import draw_training, is_separate, points, runs_table, section_of, smoothed_rewards, write_report
from evaluation.results import begin, evaluations, read_results, same_start, store_result
from evaluation.runs import carry_out
from trainspan_loop.state.run_folder import RunFolder
from trainspan_rollouts.harnesses.connection import read_connection
from trainspan_schemas.agents.functions import is_function_name
from trainspan_schemas.config.load import load_settings
from trainspan_schemas.config.policies import agents_of_policies
from trainspan_schemas.intervals import RewardEstimate


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps state and results in the test's own folder; returns that of the results."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    for module in ("plans", "results"):
        monkeypatch.setattr(f"evaluation.{module}.RESULTS", tmp_path / "results")
    return tmp_path / "results"


def estimated(*rewards: float) -> dict[str, Any]:
    return RewardEstimate.of([[reward] for reward in rewards]).record()


def validation(round_: int, *rewards: float) -> dict[str, Any]:
    check = {"name": "every call is stored", "ok": True, "detail": "3, 3, 3"}
    record = {"kind": "eval", "name": "validation", "round": round_, "tasks": len(rewards), "checks": [check]}
    return {**record, **estimated(*rewards), "pass_at": {"1": 0.25, "2": 0.5}}


def trained(round_: int, *, ok: bool = True) -> dict[str, Any]:
    return {
        "kind": "round",
        "round": round_,
        "skipped": None,
        "rollout": {"status": {"ok": 15, "timeout": 1}, "mean_reward": 0.2, "calls": 30, "sampled_tokens": 200},
        "dataset": {"dropped": {"zero_spread_group": 3}},
        "train": {"rows": 12, "kl": 0.01},
        "seconds": {"total": 3.0},
        "checks": [{"name": "server and trainer agree", "ok": ok, "detail": "4e-5"}],
    }


def finished(plan: Plan, *records: dict[str, Any]) -> RunFolder:
    """Writes a finished run of a plan to its state folder."""
    folder = RunFolder(plan.state / "runs" / "20260101-000000-aaaaaaaa")
    folder.path.mkdir(parents=True)
    settings = {name: {"seed": 1, "tasks": "/secret"} for name in ("rollouts", "dataset", "train", "loop")}
    folder.write("run.json", {"run_id": folder.run_id, "status": "finished", "settings": settings})
    for record in records:
        folder.append(record)
    return folder


def asked(*arguments: str) -> list[Plan]:
    return plans(parser().parse_args(["run", *arguments]))


@pytest.mark.parametrize("task", TASKS)
def test_the_settings_of_each_task_name_files_that_exist(task: str) -> None:
    plan = Plan(task, 0, "model")
    settings = plan.loaded()
    harness = settings.rollouts.harness
    assert (settings.loop.target == "") == (harness is not None)
    assert harness is None or read_connection(str(ROOT / harness)).home
    for name in filter(None, (settings.loop.target, settings.rollouts.judge)):
        assert is_function_name(name)
        assert (ROOT / name.partition(":")[0]).is_file()
    template, flags = settings.sft.chat_template_path, settings.loop.server_flags or ""
    assert template is None or (ROOT / template).is_file()
    assert ("--chat-template" in flags) == (template is not None)
    assert template is None or template in flags
    assert settings.loop.eval_tasks >= (300 if harness is None else 150)
    assert (pins_of(task) is None) == (task in EXAMPLES)
    pins = path.read_text().splitlines() if (path := pins_of(task)) else []
    assert all(line.count("==") == 1 for line in pins)
    assert pins == sorted(set(pins))


def test_an_agent_knows_nothing_of_trainspan() -> None:
    for task in TASKS:
        for path in folder_of(task).glob("*.py"):
            assert "import trainspan" not in path.read_text(), path
            assert "from trainspan" not in path.read_text(), path


def test_variants_have_states_and_results_of_their_own() -> None:
    every = [Plan("math", seed, "m", control) for seed in (0, 1) for control in (None, *CONTROLS)]
    every += [Plan("math", 0, "m", warm_steps=20), Plan("math", 0, "m", settings={"dataset.credit": "gigpo"})]
    for one, other in itertools.combinations(every, 2):
        assert one.state != other.state
        assert one.result != other.result
    assert Plan("game", 0, "m", "sft", 20, {"loop.rounds": "3"}).variant == "m-warm20-sft-rounds=3"
    assert Plan("game", 0, "m", "sft", 20, {"loop.rounds": "3"}).trained_from.variant == "m-warm20-rl-rounds=3"
    assert Plan("game", 0, str(default_model()), "sft", 20).variant == "warm20-sft"


def test_the_loop_reads_the_settings_of_a_plan() -> None:
    plan = Plan("game", 7, "m", settings={"dataset.credit": "gigpo", "loop.eval_n": "8"})
    settings = load_settings(plan.config, plan.environ("start"))
    assert (settings.loop.seed, settings.train.seed, settings.train.model) == (7, 7, "start")
    assert (settings.dataset.credit, settings.loop.eval_n, settings.loop.rounds) == ("gigpo", 8, 12)
    assert settings.rollouts.python == str(plan.python)
    assert settings.rollouts.judge is None
    coin = Plan("game", 7, "m", "random", settings={"dataset.credit": "gigpo"})
    settings = load_settings(coin.config, coin.environ("start"))
    assert settings.rollouts.judge == "evaluation/game/judge.py:coin"
    assert (settings.dataset.credit, settings.dataset.reward_name) == ("identical", "reward")
    known = Plan("game", 7, "m", settings={"rollouts.tasks": "long.jsonl"})
    assert load_settings(known.config, known.environ("start")).rollouts.tasks == str(known.tasks.parent / "long.jsonl")
    warm = Plan("game", 7, "m", "warm", settings={"loop.rounds": "3"})
    assert load_settings(warm.config, warm.environ("start")).loop.rounds == 0


def test_a_harness_is_found_in_the_tasks_environment_and_has_the_written_templates_and_probe() -> None:
    plan = Plan("terminal", 0, "m")
    environ = plan.environ("start")
    settings = load_settings(plan.config, environ)
    assert settings.rollouts.workspace == str(plan.tasks.parent / "folders" / "{id}")
    assert settings.loop.probe_tasks == str(plan.tasks.parent / "probe.jsonl")
    assert environ["PATH"].split(os.pathsep)[0] == str(plan.workspace / "environment" / "bin")
    assert "PATH" not in Plan("game", 0, "m").environ("start")


def test_a_variant_may_have_another_settings_file_and_its_result_the_figures_of_each_policy(folders: Path) -> None:
    (plan,) = plans(parser().parse_args(["run", "sql", "--seeds", "1", "--config", "two_policies.toml"]))
    assert (plan.variant, plan.config.name) == ("rl-two_policies", "two_policies.toml")
    both, shared = plan.loaded(), replace(plan, config_name="one_policy.toml").loaded()
    assert agents_of_policies(both.policies) == {"writer": ("writer",), "rewriter": ("rewriter",)}
    assert agents_of_policies(shared.policies) == {"team": ("writer", "rewriter")}
    assert replace(both, policies={}) == replace(shared, policies={})
    with pytest.raises(SystemExit, match=r"has no other\.toml"):
        plans(parser().parse_args(["run", "sql", "--config", "other.toml"]))
    own = {"policy_version": 2, "skipped": None, "train": {"rows": 12, "kl": 0.01}}
    record = {**trained(1), "train": {}, "policies": {"writer": own, "rewriter": {**own, "policy_version": 1}}}
    folder = finished(plan, validation(0, 0.0, 1.0), record, validation(1, 1.0, 1.0))
    result = store_result(plan, folder, 0.0)
    assert result["config"] == "two_policies.toml"
    figures = result["curve"][1]["policies"]
    assert [(name, one["version"], one["kl"]) for name, one in figures.items()] == [
        ("writer", 2, 0.01),
        ("rewriter", 1, 0.01),
    ]


def test_a_small_model_from_scratch_is_made_once_by_the_tasks_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plan,) = asked("calculator", "--model", "scratch", "--seeds", "1", "--set", "dataset.credit=step")
    assert plan.variant == "scratch-rl-credit=step"
    assert plan.environ(plan.start)["TRAINSPAN_TRAIN__MODEL"] == str(plan.workspace / "scratch-model")
    program = tmp_path / "policy.py"
    program.write_text("import pathlib, sys\npathlib.Path(sys.argv[1]).mkdir(parents=True)\nprint(sys.argv[2])\n")
    monkeypatch.setattr(models, "policy_program", lambda *_: program)
    make_untrained(plan)
    program.unlink()
    make_untrained(plan)
    assert Path(plan.start).is_dir()
    with pytest.raises(SystemExit, match=r"sql has no policy.py"):
        asked("sql", "--model", SCRATCH)


def test_options_become_plans(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    found = asked("sql", "--seeds", "2", "--first-seed", "3", "--model", str(tmp_path / "model"), "--eval-n", "8")
    name = f"model-{hashlib.sha256(str(tmp_path / 'model').encode()).hexdigest()[:8]}"
    assert [(plan.seed, plan.variant) for plan in found] == [(3, f"{name}-rl-eval_n=8"), (4, f"{name}-rl-eval_n=8")]
    assert (found[0].state.parent.name, found[0].model_name) == (found[0].variant, name)
    other = asked("sql", "--model", "org/name")[0]
    assert (other.model, other.variant) == ("org/name", "org_name-rl")
    usual = asked("sql")[0]
    assert (usual.model, usual.variant) == (str(tmp_path / "home" / "evaluation" / "model"), "rl")
    assert (usual.model_name, usual.result.name) == ("SmolLM2-135M-Instruct", "sql-rl-seed-0.json")
    with pytest.raises(SystemExit, match="--warm-start"):
        asked("sql", "--model", "m", "--control", "warm")
    with pytest.raises(SystemExit, match=r"SECTION\.NAME=VALUE"):
        asked("sql", "--model", "m", "--set", "credit=gigpo")


@pytest.mark.ci
def test_cpu_time_includes_descendants_and_a_resumed_run_continues_the_count_which_a_new_run_begins(
    tmp_path: Path,
) -> None:
    burn = "import time\nwhile time.process_time() < 1.2: pass\n"
    start = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {burn!r}])\ntime.sleep(30)"
    plan = Plan("math", 0, "m")
    runs = [plan.state / "runs" / name for name in ("a", "a", "b")]
    for number, run in enumerate(runs):
        run.mkdir(parents=True, exist_ok=True)
        known = len(noted(run))
        with subprocess.Popen([sys.executable, "-c", start]) as process:
            try:
                with CpuMeter(plan.state, process.pid):
                    deadline_s = time.monotonic() + 60
                    while cpu_seconds(process.pid) < 0.4 + 0.6 * (number == 1):
                        assert time.monotonic() < deadline_s
                        time.sleep(0.05)
                    (run / "rounds.jsonl").write_text("{}\n" * (known + 1))
                    while len(noted(run)) == known:
                        assert time.monotonic() < deadline_s
                        time.sleep(0.05)
            finally:
                process.kill()
    (first, first_s), (second, second_s) = noted(runs[0])
    assert (first, second) == (1, 2)
    assert 0.4 <= first_s < 5
    assert second_s >= first_s + 1.0
    ((_, new_s),) = noted(runs[2])
    assert 0.4 <= new_s < second_s
    assert [cpu_at(runs[0], record) for record in range(3)] == [first_s, second_s, None]


def test_the_largest_validation_of_a_round_counts() -> None:
    records = [validation(0, 0, 1), trained(1), validation(1, 1, 1), validation(1, 1, 0, 0, 1)]
    assert [(record["round"], record["tasks"]) for record in evaluations(records)] == [(0, 2), (1, 4)]


def test_a_finished_run_is_stored_once_and_reported(folders: Path) -> None:
    rewards = [1.0] * 5 + [0.0] * 95
    for seed, control, end in ((0, None, 80), (1, None, 90), (0, "random", 6)):
        plan = Plan("math", seed, "m", control)
        better = [1.0] * end + [0.0] * (100 - end)
        folder = finished(plan, validation(0, *rewards), trained(1, ok=seed == 0), validation(1, *better))
        (folder.path / "cpu.jsonl").write_text("[1, 10.0]\n[2, 60.0]\n[3, 120.0]\n")
        store_result(plan, folder, 1.5)
        # It is not run again, although neither environment nor model exists.
        assert carry_out(plan)["end"]["mean"] == end / 100  # type: ignore[index]
        if control is None:
            with pytest.raises(SystemExit, match="other values of model in"):
                carry_out(Plan("math", seed, "another", name="m-rl"))
    warm = Plan("math", 0, "m", "warm", 2)
    store_result(warm, finished(warm, validation(0, *better)), 0.0)
    stored = read_results(folders)
    variants = [("m-random", 0), ("m-rl", 0), ("m-rl", 1), ("m-warm2-warm", 0)]
    assert [(result["variant"], result["seed"]) for result in stored] == variants
    result = stored[1]
    assert len(result["commit"]) == 40
    assert (result["rounds"], result["rollouts"], result["cpu_s"]) == (1, 16, {"preparation": 1.5, "run": 120.0})
    assert points(result, "rollouts")[1][:2] == (16, 0.8)
    assert points(result, "cpu")[1][:2] == (2.0, 0.8)
    assert (is_separate(result["start"], result["end"]), is_separate(stored[0]["start"], stored[0]["end"])) == (
        True,
        False,
    )
    assert "/secret" not in json.dumps(stored)
    assert [check["name"] for check in stored[2]["checks"]["failed"]] == ["server and trainer agree"]
    text = write_report(folders).read_text()
    assert "| m-rl | 0 | .050 [.022, .112] | .800 [.711, .867] | yes | 1 | 16 | 2 | 3 of 3 |" in text
    assert "| m-rl | 2 | .050 | .850 [.215, 1.485] | .800 [.165, 1.435] |" in text
    assert "| m-warm2-warm | 0 | – | .060 [.028, .125] | – | 0 | 0 | – | 1 of 1 |" in text
    assert "| m-warm2-warm | 1 | – | .060 | – |" in text
    assert "| m-rl | 1 | end | .250 | .500 |" in text
    assert "| m-rl | – | – | – | 200 | – | – | – |" in text
    assert "- m-rl, seed 1: server and trainer agree: 4e-5" in text
    for axis in ("rollouts", "cpu"):
        assert (folders / f"math-{axis}.png").read_bytes().startswith(b"\x89PNG")


def test_a_state_folder_of_other_settings_is_not_taken_for_the_run(folders: Path) -> None:
    plan = Plan("math", 0, "m", name="tried")
    assert begin(plan) == begin(plan)
    finished(plan, validation(0, 0.0))
    for other in (Plan("math", 0, "m", name="tried", settings={"dataset.credit": "step"}), replace(plan, model="n")):
        with pytest.raises(
            SystemExit, match=r"other values of (settings|model) in .*tried/seed-0: remove it or give --name"
        ):
            carry_out(other)
    assert not list(folders.glob("*.json"))


def test_a_state_folder_that_began_with_other_tasks_or_weights_is_not_taken_for_the_run(tmp_path: Path) -> None:
    plan = Plan("math", 0, str(tmp_path / "model"), name="tried")
    for path, content in (
        (plan.tasks, "one"),
        (tmp_path / "model" / "model.safetensors", "one"),
        (plan.state / "x", ""),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    same_start(plan)
    same_start(plan)
    plan.tasks.write_text("two")
    with pytest.raises(
        SystemExit, match=r"tried/seed-0 began with other tasks, which were made again since: remove it"
    ):
        same_start(plan)
    plan.tasks.write_text("one")
    (tmp_path / "model" / "model.safetensors").write_text("two")
    with pytest.raises(SystemExit, match="began with other weights"):
        same_start(plan)


def test_code_that_changed_during_a_run_is_said_in_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    def commit(path: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
        git("add", "-A")
        git("commit", "-qm", path)

    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    git("init", "-q")
    commit("code.py")
    began = provenance.provenance()
    commit("docs/page.md")
    commit("evaluation/results/one.json")
    assert provenance.since(began) == {**began, "began": began["made"], "made": provenance.provenance()["made"]}
    (tmp_path / "new.py").write_text("")
    assert provenance.since(began)["changed"]
    commit("new.py")
    assert provenance.since(began)["changed"]
    assert not provenance.provenance()["changed"]


def test_tasks_of_changed_sources_are_written_again_and_models_made_from_them_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "task"
    source.mkdir()
    program = "import pathlib, sys\nfolder = pathlib.Path(sys.argv[1])\nfolder.mkdir(parents=True)\n"
    (source / "tasks.py").write_text(program + "(folder / 'tasks.jsonl').write_text('first')\n")
    (source / "agent.py").write_text("")
    monkeypatch.setattr(environments, "folder_of", lambda _: source)
    plan = Plan("shop", 0, "m", warm_steps=2)
    environments.prepare(plan)
    plan.warm_model.mkdir()
    (source / "agent.py").write_text("# read by each run")
    environments.prepare(plan)
    assert (plan.tasks.read_text(), plan.warm_model.exists()) == ("first", True)
    (source / "tasks.py").write_text(program + "(folder / 'tasks.jsonl').write_text('second')\n")
    environments.prepare(plan)
    assert (plan.tasks.read_text(), plan.warm_model.exists()) == ("second", False)
    plan.warm_model.mkdir()
    (source / "home").mkdir()
    (source / "home" / "prompt.yaml").write_text("an option of a harness")
    environments.prepare(plan)
    assert not plan.warm_model.exists()


def test_settings_of_supervised_training_reach_it_and_name_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.append(options["env"])
        return subprocess.CompletedProcess(command, 0)

    plan = Plan("shop", 0, "m", warm_steps=2, settings={"sft.max_length": "512", "dataset.credit": "step"})
    assert plan.warm_model != replace(plan, settings={}).warm_model
    assert plan.warm_model == replace(plan, settings={"sft.max_length": "512"}).warm_model
    monkeypatch.setattr(models.subprocess, "run", run)
    warm_started(plan)
    assert (seen[0]["TRAINSPAN_SFT__MAX_LENGTH"], "TRAINSPAN_DATASET__CREDIT" in seen[0]) == ("512", False)


def test_a_control_records_its_supervised_training() -> None:
    plan = Plan("math", 0, "m", "sft")
    about = plan.state / "model" / "sft" / "manifest.json"
    about.parent.mkdir(parents=True)
    figures = {"steps": 3, "examples": 4, "trained_tokens": 50, "learning_rate": 1e-4}
    about.write_text(json.dumps({**figures, "eval_loss": None, "data": {"path": "/secret"}}))
    result = store_result(plan, finished(plan, validation(0, 0.0)), 60.0)
    assert result["supervised"] == {**figures, "eval_loss": None}
    (row,) = [line for line in runs_table([{**result, "cpu_s": {"preparation": 60.0, "run": 120.0}}]) if "sft" in line]
    assert row.split(" | ")[7] == "3", "its training is part of its CPU time"


def test_training_is_drawn_as_a_mean_over_seeds_and_ablations_have_a_section_of_their_own(tmp_path: Path) -> None:
    def result(seed: int, *rewards: float | None) -> dict[str, Any]:
        curve = [{"kind": "eval"}, *({"kind": "round", "reward": reward} for reward in rewards)]
        return {"task": "game", "variant": "rl", "seed": seed, "model": SCRATCH, "settings": {}, "curve": curve}

    assert smoothed_rewards(result(0, 0.0, 0.3, 0.6, 0.9)) == pytest.approx([0.3, 0.6])
    assert smoothed_rewards(result(0, 0.0, 0.3, 0.6, None, 0.9)) == pytest.approx([0.3])
    seeds = [result(seed, 0.1 * seed, 0.2, 0.3, 0.4) for seed in range(3)]
    assert not draw_training(seeds[:2], tmp_path / "two.png")
    assert draw_training(seeds, tmp_path / "three.png")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".png"] == ["three.png"]
    assert section_of(seeds[0]) == "game-scratch"
    assert section_of({**seeds[0], "settings": {"rollouts.tasks": "short.jsonl"}}) == "game-short-scratch"
    assert section_of({**seeds[0], "model": "m"}) == "game"


def test_the_age_of_trained_calls_is_read_from_the_trainers_metrics_and_reported(folders: Path) -> None:
    plan = Plan("math", 0, "m")
    folder = finished(plan, validation(0, 0, 1), trained(1), trained(2), trained(3), validation(3, 1, 1))
    figures = [
        {"round": 1, "staleness_mean": 0.0, "staleness_max": 0, "effective_sample_share": 1.0, "bounded": 0.0},
        {"round": 2, "staleness_mean": 1.5, "staleness_max": 2, "effective_sample_share": 0.5, "bounded": 0.25},
    ]
    folder.checkpoints.mkdir()
    (folder.checkpoints / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in figures))
    stored = store_result(plan, folder, 0.0)
    assert [point["staleness_max"] for point in stored["curve"] if point["kind"] == "round"] == [0, 2, None]
    assert "| m-rl | 0.75 | 2 | .750 | .500 | .125 |" in write_report(folders).read_text()


def test_a_report_without_results_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="python -m evaluation run"):
        main(["report", "--results", str(tmp_path)])


def test_the_steps_of_supervised_training_fit_the_budget() -> None:
    # 5 s to load and 2 s per step: 2 steps take 9 s, 8 take 21 s
    assert steps_for(105, (9, 21)) == 50
    assert steps_for(1, (9, 21)) == 1


def test_rejection_sampling_takes_the_rounds_with_a_success(tmp_path: Path) -> None:
    for number, rewards in ((1, [0.0, 0.5]), (2, [1.0, 0.0]), (3, [])):
        dataset = tmp_path / f"round-{number:04d}"
        dataset.mkdir()
        (tmp_path / f"{dataset.name}.about").mkdir()
        pl.DataFrame({"rollout_reward": rewards}, schema={"rollout_reward": pl.Float64}).write_parquet(
            dataset / "part-00000.parquet"
        )
    assert [path.name for path in with_success(tmp_path, 1.0)] == ["round-0002"]
    assert [path.name for path in with_success(tmp_path, 0.5)] == ["round-0001", "round-0002"]


def test_controls_of_a_missing_run_say_what_to_run_first(tmp_path: Path) -> None:
    for control, made in (("sft", continued), ("rejection", rejection_sampled)):
        with pytest.raises(SystemExit, match="first run seed 2 without --control"):
            made(Plan("math", 2, "m", control))

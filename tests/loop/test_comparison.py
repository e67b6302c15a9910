"""Runs of two settings and two seeds, compared."""

import csv
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trainspan_cli.main import run
from trainspan_loop.report.comparison import Gain, Series, group_runs
from trainspan_loop.report.comparison_report import comparison_record, write_comparison
from trainspan_loop.report.run_report import write_report
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.series import SeedSeries
from trainspan_schemas.command_events import TrainingProgress
from trainspan_schemas.config.settings import LoopSettings, Settings
from trainspan_schemas.intervals import RewardEstimate


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    return tmp_path


def finished_run(seed: int, rate: float, start: int, end: int, scale: float = 1.0) -> RunFolder:
    """Of 100 tasks, `start` and later `end` are solved, for a reward of `scale` each."""
    folder = RunFolder.create({"loop": {"seed": seed, "rounds": 1}, "train": {"seed": seed, "learning_rate": rate}})
    for round_, successes in ((0, start), (1, end)):
        check = {"name": "every call is stored", "ok": round_ == 0 or end > 10, "detail": "<b>x</b>"}
        folder.append(
            {
                "kind": "eval",
                "name": "validation",
                "round": round_,
                "policy_version": round_,
                "tasks": 100,
                **RewardEstimate.of([[scale]] * successes + [[0.0]] * (100 - successes)).record(),
                "status": {"ok": 100},
                "seconds": 30.0,
                "checks": [check],
            }
        )
    folder.append(
        {
            "kind": "round",
            "round": 1,
            "policy_version": 1,
            "rollout": {"total": 8, "mean_reward": 0.5},
            "dataset": {"calls_seen": 9, "calls_kept": 8, "dropped": {"timeout": 1}},
            "train": {"logp_diff_max": 1e-6},
            "seconds": {"rollouts": 40.0, "dataset": 5.0, "train": 15.0, "total": 60.0},
            "checks": [],
        }
    )
    folder.checkpoints.mkdir()
    (folder.checkpoints / "metrics.jsonl").write_text(
        json.dumps({"round": 1, "version": 1, "policy_versions": [0, 0], "kl": 0.25, "error": None}) + "\n"
    )
    folder.finish("finished")
    return folder


def test_runs_are_grouped_by_their_settings_and_compared_over_their_seeds() -> None:
    runs = [finished_run(0, 1e-5, 20, 60), finished_run(1, 1e-5, 10, 40), finished_run(0, 2e-5, 20, 5)]
    slow, fast = group_runs(runs)
    assert (slow.label, fast.label) == ("train.learning_rate=1e-05", "train.learning_rate=2e-05")
    # gains .4 and .3: mean .35, s = .0707107, half = 12.7062·s/√2 = .63531
    assert (gain := slow.gain()) is not None
    assert (gain.mean, gain.n) == (pytest.approx(0.35), 2)
    assert gain.interval == pytest.approx((0.35 - 0.63531, 0.35 + 0.63531), abs=1e-5)
    assert [band.mean for band in slow.validation()] == pytest.approx([0.15, 0.5])
    assert fast.gain() == Gain(pytest.approx(-0.15), None, 1)
    (outcome,) = fast.outcomes()
    assert (outcome.alarms, outcome.best_round, outcome.seconds) == (1, 0, 120.0)


def test_only_runs_with_a_start_and_an_end_that_stand_have_a_gain_and_one_of_each_seed_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A killed run of a seed that ran again would count as no gain, and one that lost its rollouts as a large one."""
    whole = [finished_run(0, 1e-5, 20, 70), finished_run(1, 1e-5, 10, 60)]
    killed = RunFolder.create({"loop": {"seed": 0, "rounds": 1}, "train": {"seed": 0, "learning_rate": 1e-5}})
    nothing = RunFolder.create({"loop": {"seed": 2, "rounds": 1}, "train": {"seed": 2, "learning_rate": 1e-5}})
    first = whole[0].records()[0]
    killed.append(first)
    lost = finished_run(3, 1e-5, 10, 60)
    lost.append({**lost.records()[1], "round": 2, "left_out": 98})
    late = RunFolder.create({"loop": {"seed": 4, "rounds": 1}, "train": {"seed": 4, "learning_rate": 1e-5}})
    for round_ in (1, 2):
        late.append({**first, "round": round_})
    (series,) = group_runs([killed, *whole, nothing, lost, late])
    assert series.gain() == Gain(pytest.approx(0.5), None, 2)
    assert [one.run_id for one in series.counted() if one.gain is not None] == [one.run_id for one in whole]
    assert run(["compare", *(one.run_id for one in (killed, *whole, nothing, lost, late))]) == 0
    assert "gain +0.500 over 2 seeds, 3 runs left out" in capsys.readouterr().out
    assert run(["compare", nothing.run_id]) == 2
    assert "no run has a validation with rewards yet" in capsys.readouterr().err
    (alone,) = group_runs([late])
    assert alone.gain() is None
    assert comparison_record([alone])[0]["gain"] is None


def test_the_command_prints_and_writes_the_comparison(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished_run(0, 1e-5, 20, 60).run_id, finished_run(1, 1e-5, 10, 40).run_id]
    page = state / "compare.html"
    assert run(["compare", *runs, "--format", "json", "--html", str(page)]) == 0
    (series,) = json.loads(capsys.readouterr().out)
    assert [one["seed"] for one in series["runs"]] == [0, 1]
    text = page.read_text()
    assert "+0.350" in text
    # Seeds at .2 and .1, then .6 and .4: half = 12.7062·s/√2 = .635 and 1.271
    label = "all (2 seeds): from 0.15 [-0.4853, 0.7853] at round 0 to 0.5 [-0.7706, 1.771] at round 1"
    assert f'aria-label="held-out success. {label}"' in text
    assert run(["compare", "nothing"]) == 2
    assert "no run nothing" in capsys.readouterr().err


def test_a_run_with_one_held_out_task_is_valid_json(monkeypatch: pytest.MonkeyPatch) -> None:
    (series,) = group_runs([finished_run(0, 1e-5, 20, 60)])
    (outcome,) = series.outcomes()
    alone = RewardEstimate(1, 0.5, math.nan, binary=False)
    lone = replace(outcome, start=alone, end=alone, best=alone)
    monkeypatch.setattr(Series, "outcomes", lambda _: [lone])
    text = json.dumps(comparison_record([series]), allow_nan=False)
    assert json.loads(text)[0]["runs"][0]["start"]["deviation"] is None


def test_each_figure_of_the_page_is_under_its_name(tmp_path: Path) -> None:
    worse = finished_run(0, 1e-5, 20, 5)
    page = write_comparison(tmp_path / "compare.html", group_runs([worse])).read_text()
    head, row = (re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page.split("<h2>Runs</h2>")[1]) for tag in ("th", "td"))
    figures = dict(zip(head, row, strict=True))
    assert (figures["seed"], figures["run"], figures["rounds"]) == ("0", worse.run_id, "1")
    assert [figures[name][:5] for name in ("start", "end", "best")] == ["0.200", "0.050", "0.200"]
    assert figures["best"] == "0.200 after 0"
    assert figures["gain"] == "gain -0.150 over 1 seed"
    assert (figures["alarms"], figures["min"]) == ("1", "2.0")


def test_a_terminal_of_80_columns_shows_each_run_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [finished_run(seed, rate, 20, 60).run_id for rate in (1e-5, 2e-5) for seed in (0, 1)]
    assert run(["compare", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8  # a line with the gain, a head and two runs, twice
    assert lines[0] == "train.learning_rate=1e-05: gain +0.400 over 2 seeds"
    assert lines[2].split() == ["0", runs[0], "1", "0.200", "0.600", "[0.502,", "0.691]", "0.600", "(1)", "0"]


class Seen(HTMLParser):
    """The names of a document's elements and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_report_escapes_and_its_table_has_the_trainer_figures() -> None:
    folder = finished_run(0, 1e-5, 20, 60)
    page = write_report(folder, "a <run>", [("<i>gain", False, "</li><script>x")]).read_text()
    assert "a &lt;run&gt;" in page
    assert "✗ &lt;i&gt;gain: &lt;/li&gt;&lt;script&gt;x" in page
    assert "unsafe" not in page
    seen = Seen(page)
    assert "script" not in seen.tags
    assert "<i>gain" not in page
    assert "style" not in seen.attributes
    assert "holds: <b&gt;x" in page  # within an attribute, where < is text
    assert "<b>x" not in page
    (line,) = csv.DictReader((folder.path / "rounds.csv").open())
    assert (line["round"], line["reward_mean"], line["validation"], line["train_kl"]) == ("1", "0.5", "0.6", "0.25")


@pytest.mark.parametrize(("scale", "measure", "mean"), [(1.0, "success", 0.6), (-3.5, "reward", -2.1)])
def test_rewards_outside_0_and_1_are_no_success_in_any_place(
    scale: float, measure: str, mean: float, state: Path
) -> None:
    run_ = finished_run(0, 1e-5, 20, 60, scale)
    page = write_report(run_, "a run", []).read_text()
    assert f">{measure}</th>" in page
    assert f"{mean:.3f}" in page
    (line,) = csv.DictReader((run_.path / "rounds.csv").open())
    assert float(line["validation"]) == pytest.approx(mean)
    compared = state / "compare.html"
    assert run(["compare", run_.run_id, "--html", str(compared)]) == 0
    for drawn, caption in ((page, f"{measure} after each round"), (compared.read_text(), f"held-out {measure}")):
        (figure,) = re.findall(f"<figure><figcaption><b>{caption}</b>.*?</figure>", drawn)
        bottom = float(re.findall(r'class="axis"[^>]* y1="(\d+)"', figure)[0])
        heights = [float(height) for height in re.findall(r' cy="([\d.-]+)"', figure)]
        assert heights
        assert all(8 <= height <= bottom for height in heights), "the drawn values are visible"


def test_status_shows_a_mean_reward_with_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(0, 1e-5, 20, 60, 100.0)
    assert run(["status"]) == 0
    # 60 of 100 tasks with reward 100: s² = 100²·.24·100/99, t(99) = 1.9842
    assert "validation after round 1: 60.000 [50.230, 69.770], n 100" in capsys.readouterr().out
    assert run(["status", "--format", "json"]) == 0
    start, end = json.loads(capsys.readouterr().out)["run"]["validations"]
    assert (start["mean"], end["mean"], end["n"], end["binary"]) == (20.0, 60.0, 100, False)


def test_a_series_continues_with_the_unfinished_seeds() -> None:
    settings = Settings(loop=LoopSettings(seed=7))
    series = SeedSeries.open(settings, 2, resume=True)
    pending = series.unfinished()
    first_settings, first = next(pending)
    assert (first_settings.loop.seed, first_settings.train.seed) == (7, 0)
    first.finish("finished")
    second_settings, second = next(pending)
    assert (second_settings.loop.seed, second_settings.train.seed) == (8, 1)

    again = SeedSeries.open(settings, 2, resume=True)
    assert again.path == series.path
    assert [folder for _, folder in again.unfinished()] == [second]
    assert again.runs() == [first, second]
    again.finish()
    assert SeedSeries.open(settings, 2, resume=True).path != series.path


def test_a_series_goes_on_after_a_power_loss_without_what_it_damaged() -> None:
    settings = Settings(loop=LoopSettings(seed=7))
    series = SeedSeries.open(settings, 1, resume=True)
    ((_, damaged),) = series.unfinished()
    (damaged.path / "run.json").write_bytes(b"")
    ((_, again),) = SeedSeries.open(settings, 1, resume=True).unfinished()
    assert again != damaged
    assert (series.runs(), again.read("run.json")["status"]) == ([again], "running")
    series.path.write_bytes(b"{")
    assert SeedSeries.open(settings, 1, resume=True).path != series.path


def test_a_named_series_is_found_among_others_and_not_repeated() -> None:
    settings = Settings()
    named, other = SeedSeries.open(settings, 1, "kl-0", resume=True), SeedSeries.open(settings, 1, "kl-1", resume=True)
    ((_, run_of_it),) = named.unfinished()
    run_of_it.finish("finished")
    named.finish()
    assert run_of_it.run_id.endswith("-kl-0")
    again = SeedSeries.open(settings, 1, "kl-0", resume=True)
    assert (again.path, list(again.unfinished())) == (named.path, [])
    assert SeedSeries.open(settings, 1, "kl-0", resume=False).path != named.path
    assert list(SeedSeries.open(settings, 1, "kl-1", resume=True).unfinished(begun_only=True)) == []
    assert other.runs() == []


def test_a_name_stands_for_all_of_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for name, rate, end in (("low", 1e-5, 40), ("high", 1e-4, 60)):
        for seed in (0, 1):
            named = finished_run(seed, rate, 20, end)
            named.path.rename(named.path.with_name(f"20261120-10150{seed}-{name}"))
    assert run(["compare", "low", "high", "low", "--format", "json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert [(one["settings"], len(one["runs"])) for one in compared] == [
        ("train.learning_rate=1e-05", 2),
        ("train.learning_rate=0.0001", 2),
    ]


def test_status_shows_how_far_the_training_of_a_round_is(capsys: pytest.CaptureFixture[str]) -> None:
    training = finished_run(0, 1e-5, 20, 60)
    with training.held():
        training.note_training(TrainingProgress(2, step=2, steps=8, forwarded_tokens=1200, seconds=3.0))
        assert run(["status"]) == 0
    assert "training    round 2: step 2 of 8, 400 tokens/s, about 18 s left\n" in capsys.readouterr().out

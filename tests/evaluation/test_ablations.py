"""Ablations in one process: what is sampled is what the trainer scores, old rollouts are old, and results are stored."""

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from evaluation.__main__ import main
from evaluation.ablations import arms
from evaluation.ablations.arms import ABLATIONS
from evaluation.ablations.in_memory import Arm, MemoryLoop
from evaluation.ablations.rubric_rewards import RubricRewards
from evaluation.plans import FROM_SCRATCH, ROOT
from evaluation.report import section_of
from evaluation.results import read_results
from trainspan_schemas.config.settings import TrainSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an untrained model whose tokenizer merges letters and digits: it samples any split."""
    sys.path.insert(0, str(ROOT / "examples"))
    from small_llama import make_model, make_tokenizer  # type: ignore[import-not-found]

    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(["calc 12*3", "answer 12", "answer 36"] * 4, vocab_size=300, single_digits=False)
    make_model(tokenizer, layers=1, context=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rewarded(loop: MemoryLoop, monkeypatch: pytest.MonkeyPatch) -> MemoryLoop:
    """Lets every other rollout succeed, since an untrained model never does."""
    played = loop._play

    def play(asked: Sequence[Any]) -> list[Any]:
        episodes = played(asked)
        for number, episode in enumerate(episodes):
            episode.answer = episode.problem.answer if number % 2 else "another"
        return episodes

    monkeypatch.setattr(loop, "_play", play)
    return loop


@pytest.mark.ci
def test_the_trainer_scores_what_was_sampled_and_calls_are_as_old_as_the_arm_says(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = rewarded(MemoryLoop(Arm("fresh", model), 0, model, tasks=1), monkeypatch)
    found = fresh.round(1)
    assert found["logp_diff_mean"] < 1e-5
    assert (found["old_policy"], found["staleness_max"], found["reward"]) == ("logged", 0, 0.5)
    assert found["rows"] == found["calls"] == fresh.answers > 8
    old = rewarded(MemoryLoop(Arm("old", model, age=2), 0, model, tasks=1), monkeypatch)
    assert [old.round(round_)["staleness_max"] for round_ in (1, 2, 3, 4)] == [0, 1, 2, 2]


@pytest.mark.ci
def test_tokens_of_the_text_are_not_those_that_were_sampled(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"old_policy": "recompute", "correction": "none"}
    arm = Arm("text", model, retokenize=True, train=settings)
    loop = rewarded(MemoryLoop(arm, 0, model, tasks=1), monkeypatch)
    found = loop.round(1)
    assert loop.differing > 0
    assert found["logp_diff_mean"] > 1e-3
    assert found["old_policy"] == "recompute"


@pytest.mark.ci
def test_a_rubric_gives_the_rewards_and_its_model_is_wrong_where_a_hash_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    asked = [
        (f"{number}+1", str(number + 1), answer) for number in range(300) for answer in (str(number + 1), "0", None)
    ]
    true = [float(answer == reference) for _, reference, answer in asked]
    with closing(RubricRewards(0.0, 0)) as rubric:
        assert rubric.of(asked) == true
    flipped = []
    for seed in (0, 0, 1):  # the port may change, the verdicts may not
        with closing(RubricRewards(0.2, seed)) as rubric:
            flipped.append([given != right for given, right in zip(rubric.of(asked), true, strict=True)])
    assert flipped[0] == flipped[1] != flipped[2]
    assert 120 < sum(flipped[0]) < 240, "900 draws of .2: 180, with a deviation of 12"
    assert any(flipped[0][::3]), "also right answers are called wrong"


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_arms_of_an_ablation_differ_only_in_known_settings(name: str) -> None:
    found = [Arm(**fields) for fields in ABLATIONS[name]]
    assert len({arm.name for arm in found}) == len(found) > 1
    for arm in found:
        assert arm.model in FROM_SCRATCH
        TrainSettings(**arm.train)


@pytest.mark.ci
def test_an_ablation_is_stored_run_by_run_and_not_repeated(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    for module in ("plans", "results"):
        monkeypatch.setattr(f"evaluation.{module}.RESULTS", tmp_path / "results")
    monkeypatch.setattr(arms, "HELD_OUT", 4)
    monkeypatch.setattr(arms, "TASKS", 1)
    (tmp_path / "home/evaluation/calculator").mkdir(parents=True)
    (tmp_path / "home/evaluation/calculator/scratch-splits-model").symlink_to(model)
    monkeypatch.setattr(arms, "prepare", lambda plan: None)
    assert main(["ablate", "ids", "--seeds", "1", "--rounds", "1"]) == 0
    first = capsys.readouterr().out
    assert main(["ablate", "ids", "--seeds", "1", "--rounds", "1"]) == 0
    assert capsys.readouterr().out == first
    stored = read_results(tmp_path / "results")
    assert [result["variant"] for result in stored] == ["memory-ids-captured", "memory-ids-retokenized"]
    assert {section_of(result) for result in stored} == {"calculator-memory-ids"}
    assert all(result["rollouts"] == 8 and len(result["commit"]) == 40 for result in stored)
    with pytest.raises(SystemExit, match="other values of settings"):
        main(["ablate", "ids", "--seeds", "1", "--rounds", "2"])

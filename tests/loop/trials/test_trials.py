"""Trials on files: what is decided, and that a loop that was killed at any point comes to the same end."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from tests.loop.run_results import run_result
from tests.training.support.swap_server import PolicyServer, policy_server
from trainspan_loop.clients.policy_server import PolicyClient
from trainspan_loop.processes.screen import Screen
from trainspan_loop.processes.services import Services
from trainspan_loop.processes.stages import Collected, Stages
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import LoopTasks, TaskPool
from trainspan_loop.trials import evidence, trials
from trainspan_loop.trials.trials import Trial, Trials, check_trials
from trainspan_rollouts.ledger.paths import ledger_file
from trainspan_rollouts.records import Shard
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, checkpoint_name, read_latest, write_latest
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.config.load import load_settings, override
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.policy_server import Offer
from trainspan_training.checkpoints import published, rollback
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry
from trainspan_training.checkpoints.swap_request import PolicyAddress


class KilledError(BaseException):
    """Stands for kill -9: nothing after it happens."""


@dataclass
class World:
    """A run's folder, and a policy server; `rewards` are those of every trial task under each version."""

    folder: RunFolder
    pool: TaskPool
    server: PolicyServer
    rewards: dict[int, float]
    rolled_out: list[tuple[int, int]] = field(default_factory=list)
    """(round, version) of each time the trial tasks were rolled out."""
    restarts: int = 0
    behind: list[str] = field(default_factory=list)
    """What servers that stay on another version say."""
    others: list[int] = field(default_factory=list)
    """Further versions that answer trial tasks, of servers that missed a swap."""

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def policy(self) -> PolicyClient:
        return PolicyClient(self.server.url)

    def version(self, _: None = None) -> int:
        return int(self.server.state["version"])

    def keep_alive(self) -> None:
        self.restarts += 1

    def level_servers(self) -> list[str]:
        return self.behind

    def collect_alongside(self, run_id: str, tasks: Path, round_: int, n: int) -> Collected:
        self.rolled_out.append((round_, self.version()))
        names = [json.loads(line)["id"] for line in tasks.read_text().splitlines()]
        ends = [
            {"end": f"{one}:{name}", "rollout": "r", "attempt": 0, "status": "ok"} for name in names for one in range(n)
        ]
        lines = [{"tasks": "", "target": []}, *({**end, "reward": self.rewards[self.version()]} for end in ends)]
        path = ledger_file(run_id, round_, "val", Shard(0, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Collected(run_result(), [], 1.0, is_stored=True, versions={"policy": [self.version(), *self.others]})

    def trials(self) -> Trials:
        """Those of a loop that starts: its server serves `latest`."""
        latest = read_latest(self.folder.checkpoints)
        assert latest is not None
        self.serve(CheckpointMeta.read(latest).version)
        settings = load_settings(None, {"TRAINSPAN_LOOP__TRIAL_TASKS": "trial.jsonl"})
        return Trials(
            settings,
            self.pool,
            cast("Services", self),
            cast("Stages", self),
            self.folder,
            Screen(Console(quiet=True), ""),
        )

    def serve(self, version: int) -> None:
        self.server.state = {"version": version, "checkpoint": checkpoint_name(version)}

    def train(self, round_: int, version: int, parent: str) -> None:
        """What the trainer leaves behind: the round's checkpoint, in service."""
        manifest = manifest_path(dataset_dir(self.folder.datasets, round_))
        manifest.parent.mkdir(parents=True)
        manifest.write_text(f'{{"round": {round_}}}')
        sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest()
        self.checkpoint(version, parent, sha256)

    def checkpoint(self, version: int, parent: str, sha256: str | None) -> None:
        root, name = self.folder.checkpoints, checkpoint_name(version)
        (root / name).mkdir(parents=True)
        CheckpointMeta("full", version, parent, "model", sha256).write(root / name)
        ledger = CheckpointLedger(root)
        ledger.append(LedgerEntry("trained", sha256, name))
        ledger.append(LedgerEntry("published", sha256, name))
        write_latest(root, name)
        self.serve(version)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Version 1 in service with its trial on file; versions from 2 on are worse."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    tasks = tmp_path / "trial.jsonl"
    tasks.write_text("".join(json.dumps({"id": f"t{place}", "input": "", "split": "val"}) + "\n" for place in range(6)))
    with policy_server((200, {"canary": {"status": "fresh"}})) as server:
        found = World(RunFolder.create({}), TaskPool(tasks, "val"), server, {0: 0.5, 1: 1.0, 2: 0.0, 3: 1.0})
        found.checkpoint(0, "model", None)
        found.trials().begin_trials()
        found.train(1, 1, checkpoint_name(0))
        assert found.trials().judge(1) is not None
        publish = published.publish

        def swap(address: PolicyAddress, offer: Offer, accepted: Offer | None, **options: Any) -> Any:
            done = publish(address, offer, accepted, **options)
            if done.outcome == "swapped":
                found.serve(offer.version)
            return done

        monkeypatch.setattr(published, "publish", swap)
        yield found


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, turn: int = 1) -> None:
    """The loop is killed when it calls this for the `turn`th time."""
    original, calls = getattr(owner, name), []

    def killed(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == turn:
            raise KilledError
        return original(*args, **options)

    monkeypatch.setattr(owner, name, killed)


def events(world: World) -> list[tuple[str, str | None]]:
    return [(entry.event, entry.checkpoint) for entry in CheckpointLedger(world.folder.checkpoints).entries][6:]


def check_refused(world: World, trial: Trial | None) -> None:
    assert trial is not None
    assert (trial.refused or "").startswith("version 2 is worse than version 1: reward 1.000 → 0.000 on 6 tasks")
    assert (trial.in_service, trial.failure, world.version()) == (1, None, 1)
    assert read_latest(world.folder.checkpoints) == world.folder.checkpoints / "policy-000001"
    assert CheckpointLedger(world.folder.checkpoints).is_withdrawn("policy-000002")
    assert not CheckpointLedger(world.folder.checkpoints).is_withdrawn("policy-000001")
    files = evidence.EvidenceFiles(world.folder)
    again = files.of_version(1)
    assert again is not None
    # Once when it was new, and once when it was put back.
    assert {len(rewards) for rewards in again.rewards.values()} == {2}


def test_a_worse_version_is_refused_and_the_one_before_is_tried_again(world: World) -> None:
    assert world.rolled_out == [(0, 0), (1, 1)]
    world.train(2, 2, checkpoint_name(1))
    check_refused(world, world.trials().judge(2))
    assert world.rolled_out[2:] == [(2, 2), (2, 1)]
    assert events(world) == [("withdrawn", "policy-000002"), ("published", "policy-000001")]
    world.train(3, 3, checkpoint_name(1))
    accepted = world.trials().judge(3)
    assert accepted is not None
    assert (accepted.verdict.before, accepted.refused, accepted.in_service) == (1, None, 3)


def test_a_version_of_which_another_one_answered_trial_tasks_is_not_judged(world: World) -> None:
    world.train(2, 2, checkpoint_name(1))
    world.others = [1]
    mixed = world.trials().judge(2)
    assert mixed is not None
    assert mixed.refused is None
    assert mixed.verdict.unjudged == (
        "other versions answered its trial tasks: policy: version 2, 1, and version 2 is in service"
    )


@pytest.mark.parametrize(
    ("owner", "name", "turn"),
    [
        (World, "collect_alongside", 1),  # in the trial's rollouts
        (evidence.EvidenceFiles, "keep", 1),  # after them
        (trials, "judge", 1),
        (trials, "roll_back", 1),  # with the verdict on file
        (CheckpointLedger, "append", 1),  # after the server has swapped back
        (CheckpointLedger, "append", 2),
        (rollback, "write_latest", 1),
        (World, "collect_alongside", 2),  # in the rollouts of the version before, back in service
        (evidence.EvidenceFiles, "keep", 2),
    ],
)
def test_a_loop_killed_between_swap_and_the_rounds_record_comes_to_the_same_end(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, turn: int
) -> None:
    world.train(2, 2, checkpoint_name(1))
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, turn=turn)
        with pytest.raises(KilledError):
            world.trials().judge(2)
    restarted = world.trials()
    restarted.begin_trials()
    check_refused(world, restarted.judge(2))
    # And once more, if it is killed after the end and before the record.
    check_refused(world, world.trials().judge(2))
    assert [event for event, _ in events(world)].count("withdrawn") == 1


def test_the_model_that_the_run_starts_from_can_be_put_back(world: World) -> None:
    world.rewards |= {0: 1.0, 4: 0.0}
    root = world.folder.checkpoints
    world.folder = RunFolder.create({})
    world.checkpoint(0, "model", None)
    world.trials().begin_trials()
    world.train(1, 4, checkpoint_name(0))
    trial = world.trials().judge(1)
    assert trial is not None
    assert (trial.verdict.before, trial.in_service, world.version()) == (0, 0, 0)
    assert root != world.folder.checkpoints


def test_what_is_not_in_service_is_not_judged(world: World) -> None:
    world.train(2, 2, checkpoint_name(1))
    tried = world.trials()
    world.serve(1)
    trial = tried.judge(2)
    assert trial is not None
    assert trial.verdict.unjudged == "the policy server has version 1, not 2"
    assert (trial.refused, world.rolled_out[2:]) == (None, [])
    # The next version is compared with the last one that was judged.
    world.train(3, 3, checkpoint_name(2))
    following = world.trials().judge(3)
    assert following is not None
    assert (following.verdict.before, following.refused) == (1, None)


def test_a_version_that_was_taken_out_of_service_by_hand_is_not_judged(world: World) -> None:
    world.train(2, 2, checkpoint_name(1))
    rollback.roll_back(world.folder.checkpoints, 1, PolicyAddress(world.url), retry_for_s=1)
    trial = world.trials().judge(2)
    assert trial is not None
    assert trial.verdict.unjudged == "version 2 was taken out of service by hand"


def test_a_server_that_does_not_swap_back_leaves_an_alarm(world: World) -> None:
    world.train(2, 2, checkpoint_name(1))
    world.server.answers = [(409, {"error": "does not fit"})]
    tried = world.trials()
    trial = tried.judge(2)
    assert trial is not None
    assert trial.failure == "the policy server did not swap to policy-000001: does not fit"
    assert (trial.in_service, world.restarts) == (2, 2)
    assert [check.ok for check in tried.checks(trial)] == [True, True, True, False]
    # A loop that is started again tries again.
    world.server.answers = [(200, {"canary": {"status": "fresh"}})]
    check_refused(world, world.trials().judge(2))


def test_a_server_of_several_that_stays_on_a_refused_version_leaves_an_alarm(world: World) -> None:
    world.train(2, 2, checkpoint_name(1))
    world.behind = ["the policy server at http://b does not take policy-000001: no room"]
    tried = world.trials()
    trial = tried.judge(2)
    assert trial is not None
    assert trial.failure == world.behind[0]
    assert [check.ok for check in tried.checks(trial)] == [True, True, True, False]


def test_a_swap_back_may_take_as_long_as_any_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(trials, "roll_back", lambda *_, retry_for_s: waited.append(retry_for_s))
    world.train(2, 2, checkpoint_name(1))
    assert world.trials().judge(2) is not None
    assert waited == [Settings().train.publish_timeout_s]


def test_a_round_that_made_no_version_has_no_trial(world: World) -> None:
    assert world.trials().judge(2) is None


def test_trials_that_could_refuse_nothing_are_an_error(tmp_path: Path) -> None:
    def checked(tasks: int, **loop: object) -> None:
        file = tmp_path / "trial.jsonl"
        lines = [json.dumps({"id": f"t{place}", "input": "", "split": "val"}) for place in range(tasks)]
        file.write_text("\n".join(lines) + "\n")
        check_trials(settings_of(file, **loop), TaskPool(file, "val"))

    def settings_of(file: Path, **loop: object) -> Settings:
        return load_settings(
            None,
            {f"TRAINSPAN_LOOP__{name.upper()}": str(value) for name, value in {"trial_tasks": file, **loop}.items()},
        )

    checked(6)
    checked(3, trial_n=2)
    with pytest.raises(ConfigError, match=r"has 5 tasks of split val: if all of them fail, p is 0.031, above half of"):
        checked(5)
    with pytest.raises(ConfigError, match="trial_level = 1 must be between 0 and 1"):
        checked(6, trial_level=1)
    with pytest.raises(ConfigError, match="needs an agent that the loop can run"):
        check_trials(settings_of(tmp_path / "trial.jsonl"), LoopTasks.open(load_settings(None, {})).trial)
    (tmp_path / "trial_judge.py").write_text("def judge_group(task, results): return [0.0 for _ in results]")
    judged = override(settings_of(tmp_path / "trial.jsonl").rollouts, judge=f"{tmp_path}/trial_judge.py:judge_group")
    with pytest.raises(
        ConfigError, match=r"trial_judge.py:judge_group compares rollouts of one version with each other"
    ):
        check_trials(
            replace(settings_of(tmp_path / "trial.jsonl"), rollouts=judged), TaskPool(tmp_path / "trial.jsonl", "val")
        )

"""Writes the games of the game agent, made by TextWorld: `python tasks.py FOLDER`.

`random_play.jsonl` has turns of a player who takes any offered command: the small model that `policy.py` makes learns these.
`short.jsonl` has games of four quests of one command each, `long.jsonl` games of four quests and at least eight turns. Each is
for training and held out: ablations of credit ask how fast a game is learned, not whether what was learned holds for others.

A game has one or two rooms, two or three objects and two quests, each worth a point; the second begins where the first
ends. The goal names the last command of each quest, and the commands before it must be found.
A hash of the goal decides whether a game is for training or held out, so no goal is in both.
"""

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from prompt import messages  # noqa: E402

from evaluation.task_files import is_heldout, write_lines, write_tasks  # noqa: E402

TRAIN_GAMES, HELDOUT_GAMES, DEMONSTRATED_GAMES = 150, 300, 100
HELDOUT_PERCENT = 50
ABLATION_GAMES, ABLATION_QUESTS = 24, 4
SHORT, LONG = ("short", 1), ("long", 2)
"""Name of the file, and commands per quest."""
RANDOM_GAMES_OF_A_GOAL = 4
MAX_COMMANDS = 8
"""Commands offered in the first state; games with more are left out."""


def games(quests: int = 2, commands: Sequence[int] = (1, 2)) -> Iterator[Any]:
    """Yields games endlessly; the number of a game is its seed and decides its size, of `commands` per quest."""
    import textworld
    from textworld.generator import make_game
    from textworld.generator.chaining import QuestGenerationError

    seed = 0
    while True:
        options = textworld.GameOptions()
        options.nb_rooms = 1 + seed % 2
        options.nb_objects = quests + seed % 2
        options.nb_parallel_quests = quests
        options.quest_length = commands[seed // 2 % len(commands)]
        options.seeds = seed
        seed += 1
        with contextlib.suppress(QuestGenerationError):
            yield make_game(options)


def goal_of(game: Any) -> str:
    """Returns the last command of each quest: `drop cd, then close bureau`."""
    return ", then ".join(quest.commands[-1] for quest in game.quests)


def walk(path: Path, goal: str) -> list[dict[str, Any]]:
    """Returns each turn of a perfect player: the agent's prompt, then the completion to learn. Empty if it cannot win."""
    import textworld
    from agent import offered

    infos = textworld.EnvInfos(admissible_commands=True, policy_commands=True, score=True)
    environment = textworld.start(str(path), infos)
    state, score, done, found = environment.reset(), 0, False, []
    while not done:
        if not state["policy_commands"]:
            return []
        command = state["policy_commands"][0]
        answer = [{"role": "assistant", "content": command}]
        found.append({"prompt": messages(goal, score, offered(state)), "completion": answer})
        state, score, done = environment.step(command)
    return found


def wander(path: Path, goal: str, generator: random.Random) -> Iterator[dict[str, Any]]:
    """Yields each turn of a player who takes any offered command."""
    import textworld
    from agent import MAX_TURNS, offered

    environment = textworld.start(str(path), textworld.EnvInfos(admissible_commands=True, score=True))
    state, score, done = environment.reset(), 0, False
    for _ in range(MAX_TURNS):
        commands = offered(state)
        command = generator.choice(commands)
        yield {"prompt": messages(goal, score, commands), "completion": [{"role": "assistant", "content": command}]}
        state, score, done = environment.step(command)
        if done:
            return


def random_play(tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns turns of random games on the training tasks."""
    generator = random.Random(0)
    training = [task["input"] for task in tasks if task["split"] == "train"]
    return [
        turn
        for _ in range(RANDOM_GAMES_OF_A_GOAL)
        for one in training
        for turn in wander(Path(one["game"]), one["goal"], generator)
    ]


def n_commands(turn: dict[str, Any]) -> int:
    """Returns the number of commands that a turn offers."""
    return len(turn["prompt"][-1]["content"].rpartition("commands: ")[2].split(", "))


def save(game: Any, path: Path, *, least_turns: int) -> list[dict[str, Any]]:
    """Writes the game's file and returns a perfect player's turns; no file and no turns if the game is left out.

    That is if it takes fewer turns, because a quest may be fulfilled from the beginning, or offers too many commands.
    """
    game.save(str(path))
    turns = walk(path, goal_of(game))
    if len(turns) < least_turns or n_commands(turns[0]) > MAX_COMMANDS:
        path.unlink()
        return []
    return turns


def task_of(path: Path, goal: str, split: str, turns: int) -> dict[str, Any]:
    """Returns the line of `tasks.jsonl` for a game that a perfect player wins in `turns` turns."""
    return {
        "id": path.stem,
        "input": {"game": str(path.resolve()), "goal": goal},
        "split": split,
        "meta": {"goal": goal, "turns": turns},
    }


def write_games(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Writes the games' files; returns tasks and demonstrations."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"train": TRAIN_GAMES, "val": HELDOUT_GAMES}
    tasks: list[dict[str, Any]] = []
    demonstrations: list[dict[str, Any]] = []
    seen: set[str] = set()
    for game in games():
        goal = goal_of(game)
        split = "val" if is_heldout(goal, HELDOUT_PERCENT) else "train"
        if game.max_score != 2 or goal in seen or not wanted[split]:
            continue
        path = folder / f"{split}-{wanted[split]:04d}.json"
        turns = save(game, path, least_turns=2)
        if not turns:
            continue
        seen.add(goal)
        wanted[split] -= 1
        tasks.append(task_of(path, goal, split, len(turns)))
        if split == "train" and wanted[split] >= TRAIN_GAMES - DEMONSTRATED_GAMES:
            demonstrations += turns
        if not any(wanted.values()):
            break
    return tasks, demonstrations


def write_ablation_games(folder: Path, name: str, commands: int) -> list[dict[str, Any]]:
    """Writes the files of games of four quests; returns each as a task for training and as one that is held out."""
    folder.mkdir(parents=True, exist_ok=True)
    training: list[dict[str, Any]] = []
    for game in games(ABLATION_QUESTS, (commands,)):
        if game.max_score != ABLATION_QUESTS:
            continue
        path = folder / f"{name}-{len(training):04d}.json"
        turns = save(game, path, least_turns=ABLATION_QUESTS * commands)
        if turns:
            training.append(task_of(path, goal_of(game), "train", len(turns)))
        if len(training) == ABLATION_GAMES:
            break
    return [*training, *(task | {"id": f"known-{task['id']}", "split": "val"} for task in training)]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    made, shown = write_games(target / "games")
    long_games = write_ablation_games(target / "games", *LONG)
    write_lines(target / "random_play.jsonl", random_play([*made, *long_games]))
    write_lines(target / "long.jsonl", long_games)
    write_lines(target / "short.jsonl", write_ablation_games(target / "games", *SHORT))
    write_tasks(target, made, shown)

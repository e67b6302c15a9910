"""Writes the terminal tasks and a template of the work folder for each: `python tasks.py FOLDER`.

A hash of the kind and of the name of its file decides whether a task is for training or held out.
`probe.jsonl` has the kinds that no training task and no demonstration is of.
"""

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import yaml  # noqa: E402
from kinds import KINDS, STEMS, UNSEEN, Kind, Wanted  # noqa: E402

from evaluation.task_files import is_heldout, write_lines, write_tasks  # noqa: E402

SEED = 0
TRAIN_TASKS, HELDOUT_TASKS, PROBE_TASKS, DEMONSTRATIONS = 660, 330, 100, 220
HELDOUT_PERCENT = 40
DONE = "$DONE"
"""The command that ends a rollout."""


def drawn(kinds: Mapping[str, Kind], split: str, count: int) -> list[tuple[str, Wanted]]:
    """Returns `count` tasks of the kinds in turn; no text occurs twice, and each name of a file is in one split of a kind."""
    generator = random.Random(f"{SEED} {split}")
    stems = {
        kind: [stem for stem in STEMS if is_heldout(f"{kind} {stem}", HELDOUT_PERCENT) == (split == "val")]
        for kind in kinds
    }
    found: list[tuple[str, Wanted]] = []
    seen: set[str] = set()
    while len(found) < count:
        for kind, make in kinds.items():
            wanted = make(generator, generator.choice(stems[kind]))
            if wanted.text not in seen:
                seen.add(wanted.text)
                found.append((kind, wanted))
    return found[:count]


def task_of(number: int, kind: str, wanted: Wanted, split: str, name: str) -> dict[str, Any]:
    meta = {"kind": kind, "commands": list(wanted.commands), "after": dict(wanted.after)}
    return {"id": f"{name}-{number:04d}", "input": wanted.text, "split": split, "meta": meta}


def write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Writes a template of a work folder."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)


def demonstration(wanted: Wanted, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the agent's prompt and the commands to learn, with what they print as mini-swe-agent shows it."""
    prompt = [
        {"role": "system", "content": config["agent"]["system_template"]},
        {"role": "user", "content": config["agent"]["instance_template"].replace("{{task}}", wanted.text)},
    ]
    completion: list[dict[str, str]] = []
    for command in wanted.commands:
        printed = wanted.before["word.txt"] if command == "cat word.txt" else ""
        shown = config["model"]["observation_template"].replace("{{output.output[:300]}}", printed)
        completion += [
            {"role": "assistant", "content": block(command)},
            {"role": "user", "content": shown.replace("{{output.returncode}}", "0")},
        ]
    return {"prompt": prompt, "completion": [*completion, {"role": "assistant", "content": block(DONE)}]}


def block(command: str) -> str:
    """Returns an answer that mini-swe-agent takes as the command."""
    return f"```bash\n{command}\n```"


def write(target: Path) -> None:
    """Writes tasks, probe, demonstrations and the templates of the work folders."""
    sets = {
        "train": ("train", drawn(KINDS, "train", TRAIN_TASKS)),
        "heldout": ("val", drawn(KINDS, "val", HELDOUT_TASKS)),
        "unseen": ("val", drawn(UNSEEN, "val", PROBE_TASKS)),
    }
    written: dict[str, list[dict[str, Any]]] = {name: [] for name in sets}
    for name, (split, members) in sets.items():
        for number, (kind, wanted) in enumerate(members):
            written[name].append(task_of(number, kind, wanted, split, name))
            write_folder(target / "folders" / written[name][-1]["id"], wanted.before)
    config = yaml.safe_load((HERE / "home" / "mini.yaml").read_text())
    shown = [demonstration(wanted, config) for _, wanted in sets["train"][1][:DEMONSTRATIONS]]
    write_lines(target / "probe.jsonl", written["unseen"])
    write_tasks(target, [*written["train"], *written["heldout"]], shown)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

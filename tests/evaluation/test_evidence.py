"""docs/evidence.md: its commands are those that made the stored results."""

import json
import re
import shlex
import subprocess

from evaluation.__main__ import parser, plans
from evaluation.ablations.arms import ABLATIONS, ROUNDS, plan_of
from evaluation.plans import RESULTS, ROOT, Plan
from evaluation.results import read_result

PAGE = (ROOT / "docs" / "evidence.md").read_text()
PRINT = 'python() { printf "%q " "$@"; echo; }; '
"""The shell expands loops and variables, and prints the arguments instead of running Python."""


def commands(text: str) -> list[list[str]]:
    """The arguments of each `python -m evaluation` in the page's blocks."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        done = subprocess.run(["bash", "-c", PRINT + block], capture_output=True, text=True, check=True)
        found += [shlex.split(line)[2:] for line in done.stdout.splitlines()]
    return found


def of(arguments: list[str]) -> list[Plan]:
    options = parser().parse_args(arguments)
    if options.command == "ablate":
        seeds, name = range(options.first_seed, options.first_seed + options.seeds), options.ablation
        rounds = options.rounds or ROUNDS[name]
        return [plan_of(name, arm, seed, rounds) for seed in seeds for arm in ABLATIONS[name]]
    return plans(options) if options.command == "run" else []


def test_each_command_of_the_page_finds_its_stored_results() -> None:
    shown, _, not_run = PAGE.partition("## Not run")
    asked = [plan for arguments in commands(shown) for plan in of(arguments)]
    assert len(asked) > 50
    missing = [plan.result.name for plan in asked if read_result(plan) is None]
    assert not missing
    others = [plan for arguments in commands(not_run) for plan in of(arguments)]
    assert others
    assert all(read_result(plan) is None for plan in others)


def test_each_stored_result_is_made_by_a_command_of_the_page() -> None:
    made = {plan.result.name for arguments in commands(PAGE) for plan in of(arguments)}
    at_commit = dict(re.findall(r"`([\w-]+\.json)`, at commit ([0-9a-f]{12})", PAGE))
    stored = {path.name for path in RESULTS.glob("*.json")}
    assert not stored - made - set(at_commit), "results without a command or a commit in docs/evidence.md"
    for name, commit in at_commit.items():
        assert json.loads((RESULTS / name).read_text())["commit"].startswith(commit)


def test_no_stored_result_names_a_folder_of_the_machine() -> None:
    """Values of settings in quotes; a whole path of the machine begins with a slash."""
    results = sorted(RESULTS.glob("*.json"))
    assert results
    assert [path.name for path in results if re.search(r'": "/', path.read_text())] == []

"""`python -m evaluation run TASK`, `… ablate ABLATION`, `… bakeoff WHERE` and `… report`; docs/evaluation.md describes them."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from evaluation.ablations.arms import ABLATIONS, ablate
from evaluation.plans import CONTROLS, FROM_SCRATCH, RESULTS, TASKS, Plan, default_model, folder_of, policy_program
from evaluation.provenance import provenance
from trainspan_schemas.config.load import CONFIG_FILE

CHAIN = "chain"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m evaluation", description=__doc__)
    commands = found.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a task over several seeds; resumes what is unfinished")
    run.add_argument("task", choices=TASKS)
    run.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    run.add_argument("--first-seed", type=int, default=0)
    run.add_argument(
        "--model", help=f"folder, Hugging Face id, {' or '.join(FROM_SCRATCH)} (default: SmolLM2-135M-Instruct)"
    )
    run.add_argument("--control", choices=CONTROLS, help="a control instead of the loop itself")
    run.add_argument("--warm-start", type=int, default=0, metavar="STEPS", help="supervised steps before the run")
    run.add_argument("--rounds", type=int, help="rounds instead of the configured number")
    run.add_argument("--eval-n", type=int, default=1, help="rollouts per held-out task; 8 gives pass@1 to pass@8")
    run.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="change a setting")
    run.add_argument("--config", metavar="FILE", default=CONFIG_FILE, help="settings file in the task's folder")
    run.add_argument("--name", help="name of the variant in the results")
    run.add_argument("--keep", action="store_true", help="keep the checkpoints of finished runs")
    ablate = commands.add_parser("ablate", help="compare ways to train the calculator, in one process")
    ablate.add_argument("ablation", choices=ABLATIONS)
    ablate.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    ablate.add_argument("--first-seed", type=int, default=0)
    ablate.add_argument("--rounds", type=int, help="rounds (default: those of the stored results)")
    bakeoff = commands.add_parser("bakeoff", help="compare estimators of credit with true advantages")
    bakeoff.add_argument(
        "where",
        choices=(CHAIN, *TASKS),
        help="a chain with exact values, or an agent's rollouts",
    )
    bakeoff.add_argument("--seeds", type=int, default=10, help="seeds of the chain (default: 10)")
    bakeoff.add_argument("--model", help="model of the agent, as for run")
    bakeoff.add_argument("--warm-start", type=int, default=0, metavar="STEPS", help="supervised steps before")
    bakeoff.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="change a setting")
    bakeoff.add_argument("--tasks", type=int, default=8, help="training tasks (default: 8)")
    bakeoff.add_argument("--n", type=int, default=8, help="rollouts of each task (default: 8)")
    bakeoff.add_argument("--branched", type=int, default=16, help="rollouts whose calls are measured (default: 16)")
    bakeoff.add_argument("--m", type=int, default=32, help="branches from each state for the truth (default: 32)")
    bakeoff.add_argument("--calls", default="all", help="calls to measure, as for trainspan branch (default: all)")
    report = commands.add_parser("report", help="tables and pictures from the stored results")
    report.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return found


def _model(options: argparse.Namespace) -> str:
    """The model of the options. Raises SystemExit if the task cannot make it."""
    task = options.where if options.command == "bakeoff" else options.task
    model = options.model or str(default_model())
    if model in FROM_SCRATCH and not (program := policy_program(task, model)).exists():
        raise SystemExit(f"evaluation: {task} has no {program.name} that makes a small model: give another --model")
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _settings(given: Sequence[str]) -> dict[str, str]:
    """The settings of `--set`. Raises SystemExit."""
    settings: dict[str, str] = {}
    for one in given:
        key, found, value = one.partition("=")
        if not found or key.count(".") != 1:
            raise SystemExit(f"evaluation: --set {one}: give SECTION.NAME=VALUE, such as dataset.credit=gigpo")
        settings[key] = value
    return settings


def plans(options: argparse.Namespace) -> list[Plan]:
    """Returns a plan for each seed. Raises SystemExit if an option makes no sense."""
    model = _model(options)
    if options.control == "warm" and not options.warm_start:
        raise SystemExit("evaluation: --control warm evaluates a warm-started model: give --warm-start STEPS")
    settings = _settings(options.set)
    if options.rounds is not None:
        settings["loop.rounds"] = str(options.rounds)
    if options.eval_n != 1:
        settings["loop.eval_n"] = str(options.eval_n)
    if not (folder_of(options.task) / options.config).is_file():
        raise SystemExit(f"evaluation: {folder_of(options.task)} has no {options.config}")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    named = (options.control, options.warm_start, settings, options.name, options.config)
    return [Plan(options.task, seed, model, *named) for seed in seeds]


def bake_off(options: argparse.Namespace, command: str) -> str:
    """Runs a bake-off and stores its result and picture; returns its tables."""
    from evaluation.bakeoff.report import FOLDER, draw_chain, store, table_of_agent, tables_of_chain

    began = provenance()
    if options.where != CHAIN:
        from evaluation.bakeoff.agent_runs import AgentBakeoff, run_agent

        sizes = AgentBakeoff(options.tasks, options.n, options.branched, options.m, options.calls)
        plan = Plan(options.where, 0, _model(options), None, options.warm_start, _settings(options.set))
        result = run_agent(plan, sizes)
        store(f"{plan.task}-{plan.variant}", command, began, result)
        return table_of_agent(result)
    from evaluation.bakeoff.chain_results import run_chain

    result = run_chain(range(options.seeds))
    store(CHAIN, command, began, result)
    draw_chain(result, FOLDER / "chain.png")
    return tables_of_chain(result)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.command == "report":
        from evaluation.report import write_report

        print(write_report(options.results))
        return 0
    if options.command == "bakeoff":
        print(bake_off(options, shlex.join(["python", "-m", "evaluation", *(arguments or sys.argv[1:])])))
        return 0
    from evaluation.report import line_of

    if options.command == "ablate":
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        for result in ablate(options.ablation, seeds, options.rounds):
            print(line_of(result), flush=True)
        return 0
    from evaluation.runs import carry_out

    failed = 0
    for plan in plans(options):
        result = carry_out(plan, keep=options.keep)
        failed += len(result["checks"]["failed"])  # type: ignore[index]
        print(line_of(result), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

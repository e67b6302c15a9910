"""The console script: loads only the subcommand's module and turns trainspan's errors into one line and an exit code."""

import difflib
import importlib
import keyword
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainspan_cli.named_settings import NAMED, advice, named_settings, set_for_command
from trainspan_schemas.agents.functions import read_functions
from trainspan_schemas.command_events import NOTHING_TO_TRAIN
from trainspan_schemas.errors import NothingToBranchError, NothingToTrainError, TrainspanError, UsageError, pip_install

GROUPS = {
    "Run agents": {
        "rollout": "Run an agent on tasks and judge the results.",
        "gate": "Compare a candidate policy with the one in service, for CI or before a swap.",
        "branch": "Measure the calls of stored rollouts by branches from their states.",
        "reward": "Reward a rollout, or one response, after the fact.",
        "import": "Import traces from files of other tools as rollouts.",
    },
    "Learn": {
        "dataset": "Build the next dataset of transitions with credit from stored spans.",
        "export": "Write rollouts as SFT or DPO training files for TRL.",
        "sft": "Train a model on conversations, to start from.",
        "train": "Train on the newest dataset, publish the checkpoint and swap it in.",
        "loop": "Run rollouts, dataset and training for many rounds, supervised.",
    },
    "Look": {
        "view": "Show runs, datasets, groups and rollouts in a browser.",
        "explain": "Explain one rollout: its calls, rewards and credit, with its tokens in color.",
        "diff": "Show the differences between two datasets.",
        "compare": "Compare runs of the loop over seeds and settings, or any runs with a reference.",
        "judges": "Compare judges with people's labels and with each other.",
        "sql": "Query the store.",
        "status": "Show the running processes, and the runs, datasets and checkpoints on disk.",
    },
    "Operate": {
        "collector": "Receive OTLP and store it in DuckDB.",
        "serve": "Serve the policy with vLLM: OpenAI API, token-exact capture, hot swap.",
        "swap": "Put an earlier version of the policy back in service.",
        "store": "Verify, compact, measure or purge the store.",
        "doctor": "Check the installation, the processes and the capture.",
    },
}
"""Groups of subcommands, each with its line in `trainspan --help`; `trainspan_cli.commands.<name>.<name>` implements one
(`import_` for `import`)."""
_EPILOG = f"Any setting of docs/configuration.md: {NAMED} SECTION.KEY=VALUE."
COMMANDS = tuple(name for group in GROUPS.values() for name in group)


def main() -> None:
    """Entry point of the `trainspan` script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code: 0, 1 (failure), 2 (usage), 3 (nothing to train on), 75 (rollouts to resume)."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"trainspan {version('trainspan')}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        return _fail(
            f"no command {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; see `trainspan --help`"), 2
        )
    logging.basicConfig(
        level=os.environ.get("TRAINSPAN_LOG", "WARNING").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        rest, variables = named_settings(rest)
    except UsageError as error:
        return _fail(str(error), 2)
    read_functions(".toml", _rubric)
    with set_for_command(variables):
        return _invoke(name, rest)


def _rubric(file: Path) -> Callable[..., Any]:
    """The reward function that a rubric is; processing knows no judges."""
    from trainspan_rollouts.judges.rubrics.stored_rubric import stored_rubric

    return stored_rubric(file)


def _invoke(name: str, arguments: Sequence[str]) -> int:
    import typer
    from typer.main import get_command

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    try:
        own_name = f"{name}_" if keyword.iskeyword(name) else name
        module = importlib.import_module(f"trainspan_cli.commands.{own_name}")
        app.command(name=name, epilog=_EPILOG, **getattr(module, "COMMAND_OPTIONS", {}))(getattr(module, own_name))
        result = get_command(app).main(list(arguments), prog_name=f"trainspan {name}", standalone_mode=False)
    except UsageError as error:
        return _fail(str(error), 2)
    except NothingToTrainError as error:
        return _fail(str(error), NOTHING_TO_TRAIN, error.details)
    except NothingToBranchError as error:
        return _fail(str(error), NOTHING_TO_TRAIN)
    except TrainspanError as error:
        return _fail(str(error), 1)
    except typer.Abort:
        return _fail("stopped", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except ModuleNotFoundError as error:
        from trainspan_cli.extras import extra_with

        if error.name and (extra := extra_with(error.name, name)):
            return _fail(f"{name} needs {error.name}: {pip_install(extra)}", 1)
        raise
    except (OSError, RecursionError, UnicodeDecodeError) as error:  # a file that cannot be read as what it should be
        logging.getLogger(__name__).debug("%s failed", name, exc_info=True)
        file_prefix = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        return _fail(f"{file_prefix}{getattr(error, 'strerror', None) or error} (TRAINSPAN_LOG=DEBUG shows where)", 1)
    except Exception as error:
        message = getattr(
            error, "format_message", None
        )  # typer's errors have it; their base class was click's until 0.25
        if message is None:
            raise
        return _fail(f"{message()} ({advice(message()) or f'see `trainspan {name} --help`'})", 2)
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int, details: Sequence[str] = ()) -> int:
    line = " ".join(message.split())
    print(f"trainspan: {line}", file=sys.stderr)
    for detail in details:
        print(f"  {' '.join(detail.split())}", file=sys.stderr)
    return code


def _help() -> str:
    lines = [
        "Usage: trainspan COMMAND [OPTIONS]",
        "",
        "Reinforcement learning from the traces of any agent.",
    ]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<10} {line}" for name, line in commands.items())]
    lines += [
        "",
        "Help for a command: trainspan COMMAND --help. Settings: trainspan.toml, or --set SECTION.KEY=VALUE with any command.",
        "State: .trainspan/",
    ]
    return "\n".join(lines)

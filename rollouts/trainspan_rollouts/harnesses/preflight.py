"""What is checked before the first rollout of a harness: its programs and their versions, and the served model."""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trainspan_rollouts.harnesses.connection import Connection
from trainspan_rollouts.harnesses.placeholders import names_in
from trainspan_schemas.errors import ProcessError
from trainspan_schemas.http_client import ask

__all__ = ["ServedModel", "check_model", "check_programs", "served_model"]

_ANSWER_S: Final = 5.0
_MAX_BYTES: Final = 1024 * 1024
_PROBE_S: Final = 60.0
_VERSION: Final = re.compile(r"\d+(?:\.\d+)+")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a policy server says of its model."""

    name: str
    max_model_len: int | None
    """Context length in tokens; None: the server does not tell."""


def served_model(policy_url: str, api_key: str) -> ServedModel | None:
    """The first model that the server lists; None if it does not answer with a list."""
    try:
        answer = ask(
            f"{policy_url.rstrip('/')}/models",
            headers={"Authorization": f"Bearer {api_key}"},
            timeout_s=_ANSWER_S,
            max_bytes=_MAX_BYTES,
        )
        first = json.loads(answer.body)["data"][0]
        length = first.get("max_model_len")
        return ServedModel(str(first["id"]), int(length) if length else None)
    except (ConnectionError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None


def check_model(connection: Connection, model: ServedModel | None, policy_url: str) -> ServedModel:
    """Raises ProcessError if the model is unknown, or its context too short for the harness."""
    if model is None:
        raise ProcessError(
            f"the policy server at {policy_url} lists no model, which {connection.name} must be told: "
            "start `trainspan serve`, or give --policy-url"
        )
    needs_length = any(
        name in ("max_model_len", "max_output_tokens") for text in connection.texts for name in names_in(text)
    )
    if model.max_model_len is None and (needs_length or connection.min_context):
        raise ProcessError(
            f"the policy server at {policy_url} does not state the context length of {model.name}, which "
            f"{connection.name} must be told: serve the policy with `trainspan serve`"
        )
    if model.max_model_len is not None and model.max_model_len < connection.min_context:
        raise ProcessError(
            f"{connection.name} needs a context of at least {connection.min_context} tokens, and {model.name} is served with "
            f"{model.max_model_len}: raise [serving] max_model_len, or take another model"
        )
    return model


def check_programs(connection: Connection, environ: Mapping[str, str]) -> str:
    """Returns the path of the harness's program. Raises ProcessError if it is missing, does not start, or a version is too low."""
    program = shutil.which(connection.program, path=environ.get("PATH"))
    advice = f": {connection.install}" if connection.install else ""
    if program is None:
        raise ProcessError(f"{connection.name} is not installed: no program {connection.program!r} on PATH{advice}")
    for name, lowest in connection.requires.items():
        path = shutil.which(name, path=environ.get("PATH"))
        if path is None:
            raise ProcessError(f"{connection.name} needs {name} {lowest} or later, and there is none on PATH{advice}")
        version = _version(name, path, environ)
        if version is None:
            raise ProcessError(
                f"{connection.name} needs {name} {lowest} or later, but `{name} --version` states no version"
            )
        if _numbers(version) < _numbers(lowest):
            raise ProcessError(f"{connection.name} needs {name} {lowest} or later; {path} is {version}{advice}")
    return program


def _version(name: str, path: str, environ: Mapping[str, str]) -> str | None:
    """What `--version` states, in a home of its own, as in a rollout. Raises ProcessError if the program fails."""
    with tempfile.TemporaryDirectory(prefix="trainspan-probe-", ignore_cleanup_errors=True) as home:
        try:
            done = subprocess.run(
                [path, "--version"],
                env={**environ, "HOME": home},
                cwd=home,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ProcessError(f"`{name} --version` took longer than {_PROBE_S:g} s") from error
        except OSError as error:
            raise ProcessError(f"`{name} --version` cannot be started: {error.strerror}: {path}") from error
    output = (done.stdout + b"\n" + done.stderr).decode(errors="replace")
    if done.returncode:
        said = next((line for line in output.splitlines() if line.strip()), f"exit code {done.returncode}")
        raise ProcessError(f"`{name} --version` failed: {said.strip()[:300]}")
    found = _VERSION.search(output)
    return found[0] if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))

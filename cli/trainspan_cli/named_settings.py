"""`--set SECTION.KEY=VALUE`, which every command takes: any setting for this command and the processes that it starts."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from trainspan_schemas.config.load import check_known, sections, variables_of
from trainspan_schemas.config.marks import ADVANCED
from trainspan_schemas.config.setting_docs import setting_docs
from trainspan_schemas.errors import ConfigError, UsageError

__all__ = ["NAMED", "advice", "named_settings", "set_for_command"]

NAMED = "--set"
_UNKNOWN = re.compile(r"[Nn]o such option:? \'?--(?:([a-z]+)\.)?([a-z0-9_-]+)")


def named_settings(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without `--set` and its values, and variable → value. After `--` everything is the agent's.

    Raises UsageError if a value is no `SECTION.KEY=VALUE`, or of an unknown setting.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest, variables = [], {}
    words = iter(arguments[:end])
    for word in words:
        if word == NAMED:
            assignment = next(words, "")
        elif word.startswith(f"{NAMED}="):
            assignment = word.removeprefix(f"{NAMED}=")
        else:
            rest.append(word)
            continue
        name, is_given, value = assignment.partition("=")
        section, _, key = name.strip().partition(".")
        if not is_given or not key:
            raise UsageError(
                f"{NAMED} {assignment}: write {NAMED} SECTION.KEY=VALUE, such as {NAMED} train.kl_coef=0.05"
            )
        try:
            check_known(NAMED, section, key)
        except ConfigError as error:
            raise UsageError(str(error)) from error
        variables[variables_of(section, key)[0]] = value.strip()
    return [*rest, *arguments[end:]], variables


@contextlib.contextmanager
def set_for_command(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables until the command has ended."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def advice(message: str) -> str | None:
    """What to write in place of an unknown option that has the name of a setting, from the parser's message."""
    match = _UNKNOWN.search(message)
    if match is None:
        return None
    option, key = match[2].replace("_", "-"), match[2].replace("-", "_")
    if re.search(rf"--{option}(?![a-z-])", message[match.end() :]):  # the parser names the right option
        return None
    candidates = [match[1]] if match[1] in sections() else sections()
    docs = [(section, doc) for section in candidates for doc in setting_docs(section) if doc.name == key]
    if len(docs) > 1:
        return f"{key} is a setting of {len(docs)} sections: {', '.join(f'{NAMED} {section}.{key}=VALUE' for section, _ in docs)}"
    for section, doc in docs:
        spelling = f"{section}.{key} in [{ADVANCED}]" if doc.is_advanced else f"{key} in [{section}]"
        return f"{key} is a setting: {NAMED} {section}.{key}=VALUE, {spelling}, or {variables_of(section, key)[0]}"
    return None

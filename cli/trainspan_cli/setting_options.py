"""Command options generated from settings: names, types, help and defaults come from the settings."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import typer

from trainspan_schemas.config.setting_docs import SettingDoc, setting_docs

__all__ = ["Given", "help_of", "setting_options"]

Given = dict[str, Any]
"""Setting → its option's value; None if it was not given. It is passed to `override`."""

_Result = TypeVar("_Result")


def setting_options(
    section: str, *names: str, place: str = "given"
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Gives a command an option for each of these settings, in place of its keyword parameter `given: Given`,
    or of another one (`place`) for a second section.

    Without names, all settings of the section become options. Those of advanced settings are hidden in the help.
    """
    docs = [doc for doc in setting_docs(section) if not names or doc.name in names]
    if missing := set(names) - {doc.name for doc in docs}:
        raise ValueError(f"[{section}] has no {', '.join(sorted(missing))}")

    def decorate(command: Callable[..., _Result]) -> Callable[..., _Result]:
        @functools.wraps(command)
        def with_options(**values: Any) -> _Result:
            return command(**{place: {doc.name: values.pop(doc.name) for doc in docs}}, **values)

        signature = inspect.signature(command, eval_str=True)
        parameters = list(_replaced(signature, place, docs))
        with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorate


def help_of(section: str, name: str) -> str:
    """The help of an option or argument that is a setting."""
    return _help(next(doc for doc in setting_docs(section) if doc.name == name))


def _replaced(signature: inspect.Signature, place: str, docs: list[SettingDoc]) -> Iterator[inspect.Parameter]:
    """The parameters as keyword-only ones, with those of the settings in place of `place`."""
    for parameter in signature.parameters.values():
        if parameter.name == place:
            yield from (
                inspect.Parameter(doc.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(doc))
                for doc in docs
            )
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _option(doc: SettingDoc) -> Any:
    name = f"--{doc.name.replace('_', '-')}"
    values = "|".join(doc.choices) or None
    return Annotated[doc.kind | None, typer.Option(name, help=_help(doc), metavar=values, hidden=doc.is_advanced)]


def _help(doc: SettingDoc) -> str:
    """The help text without backticks, which a terminal does not render."""
    default = doc.stated_default or ("" if doc.kind is bool else _value(doc.default))
    text = f"{doc.summary.removesuffix('.')} [default: {default}]." if default else doc.summary
    return text.replace("`", "")


def _value(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)

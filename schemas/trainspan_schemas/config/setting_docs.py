"""The documentation of settings, read from the texts under their fields."""

import ast
import dataclasses
import inspect
import itertools
import re
from dataclasses import dataclass
from typing import Any, get_origin, get_type_hints

from trainspan_schemas.config.load import choices_of, keys_of, kind_of, tables
from trainspan_schemas.config.marks import advanced

__all__ = ["SettingDoc", "setting_docs"]

_DEFAULT = re.compile(r"(.*)[;,] default: (.+)\.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SettingDoc:
    """The documentation of one setting."""

    section: str
    name: str
    kind: type
    """str, int, float, bool, or tuple for a list of strings."""
    choices: tuple[str, ...]
    """The only values, if there are some."""
    default: object
    """None if another value replaces it; `stated_default` then describes that value."""
    summary: str
    """The first paragraph of its text, without the default, as in the help of an option."""
    stated_default: str | None
    """The default in words, if the text states it."""
    details: str
    """The rest of its text."""
    is_advanced: bool
    """Whether it is set in `[advanced]`."""


def setting_docs(section: str) -> tuple[SettingDoc, ...]:
    """The settings of a section (`policies`: those of one policy), in order.

    Raises ValueError if one has no text, the default None without another stated, or a number as default and another stated.
    """
    owner: Any = tables()[section]
    texts, hints = _texts(owner), get_type_hints(owner)
    marked, defaults = advanced(owner), {field.name: field.default for field in dataclasses.fields(owner)}
    return tuple(
        _read(section, name, hints[name], defaults[name], texts.get(name, ""), is_advanced=name in marked)
        for name in keys_of(owner)
    )


def _read(section: str, name: str, hint: Any, default: object, text: str, *, is_advanced: bool) -> SettingDoc:
    summary, *details = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    stated = _DEFAULT.fullmatch(summary)
    if stated and isinstance(default, (int, float)):
        raise ValueError(f"[{section}] {name} has the default {default}, and its text states another one: {stated[2]}")
    if not summary or (default is None and stated is None):
        raise ValueError(
            f'[{section}] {name} needs a text under it; if its default is None, the text ends with "; default: WHAT."'
        )
    kind, choices = kind_of(hint), choices_of(hint)
    return SettingDoc(
        section=section,
        name=name,
        kind=str if choices else get_origin(kind) or kind,
        choices=choices,
        default=default,
        summary=f"{stated[1]}." if stated else summary,
        stated_default=stated[2] if stated else None,
        details=" ".join(details),
        is_advanced=is_advanced,
    )


def _texts(owner: type) -> dict[str, str]:
    """Field → the string under it."""
    (definition,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in itertools.pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                texts[name] = inspect.cleandoc(words)
    return texts

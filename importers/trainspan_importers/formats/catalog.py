"""The formats, and which of them a file has."""

from collections.abc import Sequence
from typing import Any, Final

from trainspan_importers.formats.atif import ATIF
from trainspan_importers.formats.claude_code import CLAUDE_CODE
from trainspan_importers.formats.codex import CODEX
from trainspan_importers.formats.jaeger import JAEGER
from trainspan_importers.formats.langfuse import LANGFUSE
from trainspan_importers.formats.langsmith import LANGSMITH
from trainspan_importers.formats.openai_chat import OPENAI
from trainspan_importers.formats.otlp import OTLP, TEMPO
from trainspan_importers.formats.phoenix import PHOENIX
from trainspan_importers.reading import Format
from trainspan_schemas.errors import UsageError

__all__ = ["FORMATS", "format_named", "recognized"]

FORMATS: Final = (OTLP, TEMPO, JAEGER, PHOENIX, LANGFUSE, LANGSMITH, ATIF, CLAUDE_CODE, CODEX, OPENAI)


def format_named(name: str) -> Format:
    """Raises UsageError."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise UsageError(f"no format {name!r}: use {', '.join(known.name for known in FORMATS)}")


def recognized(head: Sequence[Any]) -> Format | None:
    """The format that recognizes the first of these records that any does; None if none does."""
    for value in head:
        for known in FORMATS:
            if known.recognizes(value):
                return known
    return None

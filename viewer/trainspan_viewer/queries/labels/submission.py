"""What a form sent: fields with text, bounded."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final
from urllib.parse import parse_qsl, unquote

from trainspan_schemas.errors import UsageError
from trainspan_viewer.queries.labels.subject import RolloutKey

__all__ = ["Submission", "rollout_key"]

_MOST_FIELDS: Final = 20
_MOST_NAME: Final = 4000


@dataclass(frozen=True, slots=True)
class Submission:
    """The fields of a form, by their names there."""

    token: str = ""
    word: str = ""
    by: str = ""
    """Who labels."""
    text: str = ""
    """The reason."""
    seen: str = ""
    """Id of the label that the page showed."""
    call: str = ""
    """A span id."""
    back: str = ""
    rollout: str | None = None
    other: str | None = None

    @classmethod
    def of_body(cls, body: bytes) -> "Submission":
        """From the content of a POST request with `application/x-www-form-urlencoded`. Raises UsageError."""
        try:
            pairs = parse_qsl(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError as error:
            raise UsageError(f"the form has more than {_MOST_FIELDS} fields") from error
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in pairs if name in names})

    @property
    def page(self) -> str:
        """`back`, the page that the form was on; the queue if it is no path on this server."""
        path = self.back
        is_own = path.startswith("/") and path[1:2] not in ("/", "\\") and path.isascii() and path.isprintable()
        return path if is_own else "/labels"

    @property
    def rollouts(self) -> Sequence[RolloutKey]:
        """The fields `rollout` and `other`. Raises UsageError."""
        # percent-encoded, since pages show invisible characters as signs
        return [rollout_key(unquote(text)) for text in (self.rollout, self.other) if text is not None]


def rollout_key(text: str) -> RolloutKey:
    """`ID:ATTEMPT`. Raises UsageError."""
    rollout_id, _, attempt = text.rpartition(":")
    if not (0 < len(rollout_id) <= _MOST_NAME and attempt.isascii() and attempt.isdecimal() and len(attempt) < 10):
        raise UsageError(f"{text[:80]!r} names no rollout: write ID:ATTEMPT")
    return rollout_id, int(attempt)

"""What an import kept and left out, and what its calls can teach."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from trainspan_processing.text.model_calls import is_model_call, text_flaw, token_flaw
from trainspan_processing.text.safe_text import visible
from trainspan_schemas.telemetry import keys

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    from trainspan_importers.account import Account
    from trainspan_importers.importing import Imported

__all__ = ["Lessons", "print_import"]

_CALL_SIGNS: Final = frozenset(
    {keys.GEN_AI_OPERATION, "llm.request.type", "openinference.span.kind", "langfuse.observation.type"}
)
_ADVICE: Final = {
    "no_root": "the trace's root span is in none of these files: import all files of a trace together",
    "no_token_ids": "only a policy server records them",
    "no_messages": "not recorded, or in log records of their own",
    "metrics": "the store keeps none",
}
_STATUS_ERROR: Final = 2


class Lessons:
    """Counts the model calls of the imported spans by what they can teach."""

    def __init__(self) -> None:
        self.n_calls: Counter[str] = Counter()
        """By format."""
        self.text: Counter[tuple[str, str]] = Counter()
        """By format and reason; without a reason: examples."""
        self.tokens: Counter[tuple[str, str]] = Counter()

    def see(self, account: "Account", span: "Span") -> None:
        """Counts a span if it is of a model call."""
        if not any(pair.key in _CALL_SIGNS for pair in span.attributes):
            return
        attributes = {pair.key: _plain(pair.value) for pair in span.attributes}
        self.count(account.format, attributes, failed=span.status.code == _STATUS_ERROR)

    def count(self, source: str, attributes: Mapping[str, Any], *, failed: bool) -> None:
        """Counts a span with these attributes if it is of a model call."""
        if is_model_call(attributes):
            self.n_calls[source] += 1
            self.text[source, text_flaw(attributes, failed=failed) or ""] += 1
            self.tokens[source, token_flaw(attributes) or ""] += 1

    def of(self, source: str) -> Iterator[tuple[str, str]]:
        """For each way to learn: the way, and the number of calls with the reasons of the others."""
        for title, counts in (
            ("by their tokens (trainspan dataset, train)", self.tokens),
            ("as text (trainspan sft, export sft, export dpo)", self.text),
        ):
            by_reason = {reason: count for (name, reason), count in counts.items() if name == source}
            reasons = _reasons({reason: count for reason, count in by_reason.items() if reason})
            yield title, f"{by_reason.get('', 0)}" + (f"; not: {reasons}" if reasons else "")


def _plain(value: "AnyValue") -> Any:
    match value.WhichOneof("value"):
        case "array_value":
            return [_plain(item) for item in value.array_value.values]
        case "kvlist_value":
            return {pair.key: _plain(pair.value) for pair in value.kvlist_value.values}
        case None:
            return None
        case name:
            return getattr(value, name)


def print_import(imported: "Imported", lessons: Lessons, refused: Mapping[str, int], *, was_sent: bool) -> None:
    """Prints a paragraph for each format; `refused` are the collector's reasons with the numbers of spans and records."""
    for account in imported.accounts.values():
        _print_account(account, was_sent=was_sent)
        _print_lessons(account, lessons)
    for path in imported.unknown[:5]:
        _print(f"left out: {path}: of no known format")
    if (n_more := len(imported.unknown) - 5) > 0:
        print(f"left out: {n_more} more files of no known format")
    for reason, n_items in refused.items():
        _print(f"{reason}: {n_items} of these spans and records")
    if not was_sent:
        print("nothing was sent: this was a dry run")


def _print_account(account: "Account", *, was_sent: bool) -> None:
    print(f"{account.format}: {account.records} records of {account.files} files")
    native = f" and {account.own_rollouts} rollouts as they were traced" if account.own_rollouts else ""
    verb = "kept" if was_sent else "would keep"
    logs = f", {account.logs} log records" if account.logs else ""
    print(
        f"  {verb}: {account.spans} spans, {account.rollouts} traces as rollouts{native}, {account.evaluations} evaluations{logs}"
    )
    if account.left_out:
        _print(f"  left out: {_reasons(account.left_out)}")
    for example in account.examples:
        _print(f"    {example}")


def _print_lessons(account: "Account", lessons: Lessons) -> None:
    n_calls = lessons.n_calls[account.format]
    print(f"  {n_calls} model calls can teach:")
    for title, counted in lessons.of(account.format):
        _print(f"    {title}: {counted}")
    if account.rollouts and not account.evaluations:
        print("  no rollout has a score: add --reward 1 if all are good examples, or see docs/import.md#scores")


def _print(text: str) -> None:
    """Prints what has text of the files in it."""
    print(visible(text))


def _reasons(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(
        f"{reason} {count}" + (f" ({_ADVICE[reason]})" if reason in _ADVICE else "") for reason, count in ordered
    )

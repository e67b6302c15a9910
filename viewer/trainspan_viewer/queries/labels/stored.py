"""The labels that the stores hold."""

from collections.abc import Collection, Sequence
from typing import Any, Final

from trainspan_schemas.errors import StoreError
from trainspan_schemas.store.labels import Label, newest, read_label, whole_pairs
from trainspan_schemas.telemetry import keys
from trainspan_viewer.queries.labels.subject import RolloutKey, Subject
from trainspan_viewer.queries.store import StoreReader

__all__ = ["TooManyLabelsError", "labels_on", "stored_labels"]

_RECORD: Final = ("time_ns", "rollout_id", "trace_id", "span_id", "attributes", "untrusted")
_MOST: Final = 10_000


class TooManyLabelsError(StoreError):
    """A rollout has more labels than a page reads, so the newest one is not known."""


def stored_labels(store: StoreReader, rollout_ids: Sequence[str]) -> list[Label]:
    """All labels of these rollouts, also those that others replace, the oldest first; none of a pair of which only one is stored.

    Raises StoreError, or TooManyLabelsError.
    """
    wanted = frozenset(rollout_ids)
    labels = _read(store, wanted)
    others = {label.other[0] for label in labels if label.other} - wanted
    whole = (label for label in whole_pairs([*labels, *_read(store, others)]) if label.rollout_id in wanted)
    return sorted(whole, key=lambda label: label.time_ns)


def _read(store: StoreReader, rollout_ids: Collection[str]) -> list[Label]:
    read = (
        read_label(time_ns, rollout_id, (trace_id, span_id), attributes, untrusted=untrusted)
        for time_ns, rollout_id, trace_id, span_id, attributes, untrusted in _records(store, sorted(rollout_ids))
    )
    # Two stores may hold the same one.
    return list({(label.id, label.rollout_id): label for label in read if label is not None}.values())


def _records(store: StoreReader, rollout_ids: Sequence[str]) -> list[tuple[Any, ...]]:
    """All trusted _RECORDs of labels of these rollouts; what one read cannot hold is read in halves."""
    if not rollout_ids:
        return []
    found = store.read(
        "records",
        _RECORD,
        _MOST,
        event_names=[keys.EVALUATION_EVENT],
        attribute=keys.LABELED_BY,
        trusted=True,
        rollout_ids=rollout_ids,
    )
    if not found.is_cut:
        return found.rows
    middle = len(rollout_ids) // 2
    if not middle:
        raise TooManyLabelsError(
            f"rollout {rollout_ids[0][:80]} has more than {_MOST} labels, or more than fit into a page"
        )
    return _records(store, rollout_ids[:middle]) + _records(store, rollout_ids[middle:])


def labels_on(labels: Sequence[Label], subject: Subject) -> tuple[list[Label], list[Label]]:
    """The labels on the subject itself, the oldest first, and the newest ones of the pairs that one of its rollouts is in."""
    wanted: frozenset[RolloutKey] = frozenset(subject.rollouts)
    ours = [label for label in labels if (label.rollout_id, label.attempt) in wanted]
    span_id = subject.span_id
    direct = [label for label in ours if label.other is None and (label.span[1] if label.span else None) == span_id]
    pairs = [label for label in newest(label for label in ours if label.other).values() if not label.is_withdrawn]
    return ([] if subject.is_group else direct), ([] if span_id else pairs)

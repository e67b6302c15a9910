"""The labels that the stores hold."""

from collections.abc import Collection, Sequence
from typing import Final

from trainspan_schemas.store.labels import Label, newest, read_label, whole_pairs
from trainspan_schemas.telemetry import keys
from trainspan_viewer.queries.labels.subject import RolloutKey, Subject
from trainspan_viewer.queries.store import StoreReader

__all__ = ["labels_on", "stored_labels"]

_RECORD: Final = ("time_ns", "rollout_id", "trace_id", "span_id", "attributes", "untrusted")
_MOST: Final = 10_000


def stored_labels(store: StoreReader, rollout_ids: Sequence[str]) -> list[Label]:
    """All labels of these rollouts, also those that others replace, the oldest first; none of a pair of which only one is stored.

    Raises StoreError.
    """
    wanted = frozenset(rollout_ids)
    labels = _read(store, wanted)
    others = {label.other[0] for label in labels if label.other} - wanted
    whole = (label for label in whole_pairs([*labels, *_read(store, others)]) if label.rollout_id in wanted)
    return sorted(whole, key=lambda label: label.time_ns)


def _read(store: StoreReader, rollout_ids: Collection[str]) -> list[Label]:
    if not rollout_ids:
        return []
    rows = store.read(
        "records",
        _RECORD,
        _MOST,
        event_names=[keys.EVALUATION_EVENT],
        attribute=keys.LABELED_BY,
        rollout_ids=sorted(rollout_ids),
    ).rows
    read = (
        read_label(time_ns, rollout_id, (trace_id, span_id), attributes, untrusted=untrusted)
        for time_ns, rollout_id, trace_id, span_id, attributes, untrusted in rows
    )
    # Two stores may hold the same one.
    return list({(label.id, label.rollout_id): label for label in read if label is not None}.values())


def labels_on(labels: Sequence[Label], subject: Subject) -> tuple[list[Label], list[Label]]:
    """The labels on the subject itself, the oldest first, and the newest ones of the pairs that one of its rollouts is in."""
    wanted: frozenset[RolloutKey] = frozenset(subject.rollouts)
    ours = [label for label in labels if (label.rollout_id, label.attempt) in wanted]
    span_id = subject.span_id
    direct = [label for label in ours if label.other is None and (label.span[1] if label.span else None) == span_id]
    pairs = [label for label in newest(label for label in ours if label.other).values() if not label.is_withdrawn]
    return ([] if subject.is_group else direct), ([] if span_id else pairs)

"""Labels of people, as `trainspan view` sends them."""

from collections.abc import Sequence
from typing import Any

from tests.processing.support.traces import START_NS, TestRollout
from tests.support.collector.process import runner_metadata
from trainspan_cli.clients.feedback import FeedbackScore, send_scores
from trainspan_schemas.store.labels import Label, PairWord, Word, pair_labels
from trainspan_schemas.telemetry import keys

__all__ = ["label", "pair", "send_labels"]


def send_labels(address: str, *labels: Label, authorization: str | None = None) -> None:
    """Sends them to an OTLP/gRPC receiver at HOST:PORT, by default with the runner's token."""
    header = authorization or dict(runner_metadata(address))["authorization"]
    send_scores(
        [FeedbackScore.of_label(each) for each in labels],
        f"http://{address}",
        f"authorization={header.replace(' ', '%20')}",
        token_advice="",
    )


def label(rollout: TestRollout, word: Word, at: float = 100.0, *, call: int | None = None, **more: Any) -> Label:
    """A label on the rollout or its call, given `at` seconds after the epoch of the tests."""
    span_ids = {span.attributes.get(keys.CALL_INDEX): span.span_id for span in rollout.spans}
    span = None if call is None else (rollout.trace_id, span_ids[call])
    return Label(
        **{
            "rollout_id": rollout.rollout_id,
            "attempt": rollout.attempt,
            "word": word,
            "by": "ann",
            "time_ns": START_NS + int(at * 1e9),
            "span": span,
            **more,
        }
    )


def pair(rollouts: Sequence[TestRollout], word: PairWord, at: float = 100.0, **more: Any) -> tuple[Label, Label]:
    """The labels of two rollouts, of which the first is `word`."""
    left, right = ((rollout.rollout_id, rollout.attempt) for rollout in rollouts)
    facts = {"by": "ann", "time_ns": START_NS + int(at * 1e9), "reason": None, **more}
    return pair_labels((left, right), word, **facts)

"""What counts as a call of an old policy."""

import pytest

from tests.support.collector.process import Attribute, span, trace_request
from trainspan_collector.journal.frames import Frame, Signal
from trainspan_collector.journal.trust import Sender
from trainspan_collector.rows.batch import Batch
from trainspan_collector.rows.tally import LoadCounting
from trainspan_collector.runtime.metrics import LoadCounts
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import encode_ids


class Loaded:
    """Loads calls of given policies and versions one after the other."""

    def __init__(self) -> None:
        self._counts: list[LoadCounts] = []
        self._counting = LoadCounting(self._counts.append)

    def n_stale(self, *calls: tuple[str | None, int], sender: Sender = Sender.SERVING) -> int:
        """How many of the calls are of a version older than the newest so far."""
        spans = []
        for number, (policy, version) in enumerate(calls, start=1):
            said: dict[str, Attribute] = {keys.PROMPT_TOKEN_IDS: encode_ids([1]), keys.POLICY_VERSION: version}
            spans.append(span(1, number, {**said, **({keys.POLICY_NAME: policy} if policy is not None else {})}))
        batch = Batch(0)
        batch.add(Frame(Signal.TRACES, 5, trace_request(*spans).SerializeToString(), 0, sender))
        self._counting.stored(batch.tally, 0, 0)
        assert self._counts[-1].calls == len(calls)
        return self._counts[-1].stale_calls

    @property
    def n_known(self) -> int:
        return len(self._counting._newest_versions)


def test_calls_are_stale_once_their_policy_has_a_newer_version() -> None:
    loaded = Loaded()
    assert loaded.n_stale((None, 3), ("a", 1), (None, 2), ("a", 2)) == 1
    assert loaded.n_stale(("a", 1), (None, 2), ("b", 1)) == 2


def test_what_an_agent_says_makes_no_other_call_stale() -> None:
    loaded = Loaded()
    assert loaded.n_stale((None, 2**31 - 1), ("a", 2**31 - 1), sender=Sender.AGENT) == 0
    assert loaded.n_stale((None, 1), ("a", 2)) == 0


@pytest.mark.parametrize("sender", [Sender.AGENT, Sender.SERVING])
def test_names_without_end_are_not_kept(sender: Sender) -> None:
    loaded = Loaded()
    loaded.n_stale(*((f"{number}" * 100, 1) for number in range(100, 200)), sender=sender)
    assert loaded.n_known == 0
    loaded.n_stale(("kept", 7), sender=Sender.SERVING)
    loaded.n_stale(*((f"{number}", 1) for number in range(5_000)), sender=sender)
    assert loaded.n_known <= 1024

"""Prompts that the policy server sampled from, with the messages and tools that a client recorded of the same requests."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.dataset.ledger import NOTHING_USED
from trainspan_processing.export.conversations import read_conversations
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.tokens import read_tokens
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.text.chat_messages import ChatMessage
from trainspan_processing.traces.trace_index import Clock, index_traces

__all__ = ["ServedPrompt", "read_served_prompts"]

_MOST_ROLLOUTS: Final = 100
"""The newest ones: an agent's prompts are alike."""


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """One request."""

    rollout_id: str
    call_index: int
    messages: list[ChatMessage]
    tools: tuple[str, ...]
    """JSON of each, as the server rendered it."""
    prompt_ids: list[int]


def read_served_prompts(
    stores: Sequence[str], base: str, agents: Collection[str], clock: Clock, settle_s: float
) -> list[ServedPrompt]:
    """The requests of the newest rollouts with the model `base` (see POLICY_BASE) by these agents; none: by all.

    Those whose messages no client recorded are left out. Raises StoreError if a store cannot be read.
    """
    with Source(stores, allow_behind=True) as source:
        traces = index_traces(source, Selection(), NOTHING_USED, now_ns=clock.now_ns(), settle_s=settle_s)
        calls = traces.calls.filter((pl.col("base") == base) & pl.col("rollout_id").is_not_null())
        if agents:
            calls = calls.filter(pl.col("agent").is_in(list(agents)))
        newest = calls.group_by(ROLLOUT_KEY).agg(pl.col("start_ns").max()).sort("start_ns", *ROLLOUT_KEY)
        calls = calls.join(newest.tail(_MOST_ROLLOUTS), on=ROLLOUT_KEY, how="semi")
        tokens = read_tokens(source, calls, [*SPAN_KEY, "prompt_ids"])
        known = calls.join(tokens, on=SPAN_KEY).select(*SPAN_KEY, "call_index", "prompt_ids")
        sampled = {row[:2]: row[2:] for row in known.iter_rows()}
        keys = [(row[0], row[1] or 0) for row in calls.select(ROLLOUT_KEY).unique(maintain_order=True).iter_rows()]
        prompts = []
        for (rollout_id, _), recorded in read_conversations(source, keys):
            for call in recorded:
                if call.served_as in sampled and call.flaw is None and not isinstance(call.prompt, str):
                    index, ids = sampled[call.served_as]
                    prompts.append(ServedPrompt(rollout_id, index, call.prompt, call.tools, list(ids)))
        return prompts

"""Constrained calls as recorded by a policy server, scored as by the trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.otlp.sink import ReceivedSpan
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.constraints import Constraint
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs
from trainspan_training.constraints.replay import Replayer, serialized_tokenizer
from trainspan_training.data.cuts import shared
from trainspan_training.data.dataset import Call, ConstrainedCall
from trainspan_training.data.micro_batches import WeightedRow, make_batches
from trainspan_training.data.sequences import make_sequences
from trainspan_training.data.token_limits import TokenLimits
from trainspan_training.model.loading import load_model, load_tokenizer
from trainspan_training.objective.attention import attention_of
from trainspan_training.objective.logprobs import score


class Scorer:
    """A model that scores recorded calls under their constraints."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_model(folder).eval()
        tokenizer, size = load_tokenizer(folder), int(self.model.config.vocab_size)
        self.replayer = Replayer(size, lambda: serialized_tokenizer(tokenizer, size))

    def replayed(self, *spans: ReceivedSpan) -> list[TokenLimits]:
        """Returns the constraint of each call's tokens."""
        made = self.replayer.replay(_constrained(number, span) for number, span in enumerate(spans))
        assert not made.dropped, (made.dropped, [constraint(span) for span in spans])
        return [made.limits[number] for number in range(len(spans))]

    @torch.no_grad()
    def logprobs(self, span: ReceivedSpan, limits: TokenLimits | None) -> Any:
        """Returns the completion's log-probabilities (C,), from the trainer's head."""
        prompt, ids = (decode_ids(span.attributes[key]) for key in (keys.PROMPT_TOKEN_IDS, keys.COMPLETION_TOKEN_IDS))
        return score(
            self.model,
            self.model,
            torch.tensor([prompt + ids]),
            torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1),
            torch.tensor(ids),
            torch.full((len(ids),), span.attributes[keys.GEN_AI_TEMPERATURE]),
            limits=limits,
        ).logprobs.numpy()

    @torch.no_grad()
    def tree_logprobs(self, spans: Sequence[ReceivedSpan]) -> list[Any]:
        """Returns the log-probabilities (C,) of each completion, forwarded together as one prefix tree."""
        calls = [_call(number, *both) for number, both in enumerate(zip(spans, self.replayed(*spans), strict=True))]
        rows = make_sequences(calls, merge=True)
        (cut,) = shared(rows, 2**20)
        (batch,) = make_batches([cut], [WeightedRow(row, np.ones(row.n_trained)) for row in rows], 1)
        found = score(
            self.model,
            self.model,
            *(torch.from_numpy(part) for part in (batch.tokens, batch.predicting, batch.targets)),
            torch.from_numpy(batch.temperatures).float(),
            attention_of(batch.branches, "sdpa", torch.device("cpu")),
            limits=batch.limits,
        ).logprobs.numpy()
        return [found[batch.calls == number] for number in range(len(spans))]


def _constrained(number: int, span: ReceivedSpan) -> ConstrainedCall:
    ids = np.array(decode_ids(span.attributes[keys.COMPLETION_TOKEN_IDS]), dtype=np.int32)
    text, free = span.attributes[keys.SAMPLING_CONSTRAINT], span.attributes.get(keys.CONSTRAINT_START, 0)
    return ConstrainedCall(number, text, free, ids)


def _call(number: int, span: ReceivedSpan, limits: TokenLimits) -> Call:
    """Returns the only call of a rollout."""
    said = span.attributes
    return Call(
        number=number,
        rollout=str(number),
        index=0,
        segment=0,
        position=0,
        group="",
        policy_version=None,
        prompt_ids=np.array(decode_ids(said[keys.PROMPT_TOKEN_IDS]), dtype=np.int32),
        completion_ids=np.array(decode_ids(said[keys.COMPLETION_TOKEN_IDS]), dtype=np.int32),
        logprobs=np.array(decode_logprobs(said[keys.COMPLETION_LOGPROBS]), dtype=np.float32),
        temperature=said[keys.GEN_AI_TEMPERATURE],
        advantage=0.0,
        limits=limits,
    )


def constraint(span: ReceivedSpan) -> Constraint:
    return Constraint.from_json(span.attributes[keys.SAMPLING_CONSTRAINT])


def logged(span: ReceivedSpan) -> Any:
    return np.array(decode_logprobs(span.attributes[keys.COMPLETION_LOGPROBS]))

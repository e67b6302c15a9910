"""The reasons that are found from a call's tokens, each at its boundary."""

import math
from typing import Any

import polars as pl
import pytest

from trainspan_processing.reasons.drop_reasons import token_reason

SOUND: dict[str, Any] = {
    "n_tokens": 2,
    "prompt_ids": [1, 2, 3],
    "completion_ids": [4, 5],
    "logprobs": [-0.5, -1.0],
    "logprobs_mode": "processed",
    "temperature": 0.7,
    "policy_version": 3,
    "policy_version_spans": None,
}
SCHEMA: dict[str, Any] = {
    "n_tokens": pl.UInt32,
    "prompt_ids": pl.List(pl.Int32),
    "completion_ids": pl.List(pl.Int32),
    "logprobs": pl.List(pl.Float32),
    "logprobs_mode": pl.String,
    "temperature": pl.Float64,
    "policy_version": pl.Int64,
    "policy_version_spans": pl.String,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"prompt_ids": None, "completion_ids": None, "logprobs": None}, "deleted"),
        ({"prompt_ids": []}, "no_token_ids"),
        ({"completion_ids": [], "logprobs": []}, "no_token_ids"),
        ({"logprobs": None}, "no_logprobs"),
        ({"logprobs": [-0.5]}, "no_logprobs"),
        # Raw ones are of the sampling distribution only at temperature 1, and an unknown mode may be raw.
        ({"logprobs_mode": "raw"}, "no_logprobs"),
        ({"logprobs_mode": None}, "no_logprobs"),
        ({"logprobs_mode": "raw", "temperature": 1.0}, None),
        ({"logprobs_mode": None, "temperature": 1.0}, None),
        ({"logprobs": [-0.5, math.nan]}, "invalid_logprobs"),
        ({"logprobs": [-0.5, -math.inf]}, "invalid_logprobs"),
        ({"policy_version_spans": "[[3, 0, 1], [4, 1, 2]]"}, None),
        ({"policy_version_spans": "[[3, 0, 1]]"}, "mixed_versions"),
        ({"policy_version_spans": "[[3, 0, 1], [4, 1, 3]]"}, "mixed_versions"),
        ({"policy_version_spans": "[[3, 1, 2]]"}, "mixed_versions"),
        ({"policy_version_spans": "[[3, 0, 0], [4, 0, 2]]"}, "mixed_versions"),
        ({"policy_version_spans": "no JSON"}, "mixed_versions"),
        ({"policy_version": 2}, "stale"),
        ({"policy_version": None}, "stale"),
        ({"prompt_ids": [1, 2, 3, 4]}, "too_long"),
    ],
)
def test_a_call_is_dropped_by_what_its_tokens_lack(change: dict[str, Any], reason: str | None) -> None:
    frame = pl.DataFrame([{**SOUND, **change}], schema=SCHEMA)
    assert frame.select(token_reason(newest_version=5, max_staleness=2, max_tokens=5)).item() == reason

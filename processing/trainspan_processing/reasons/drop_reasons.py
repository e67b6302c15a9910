"""Why a call is not trained: exactly one reason per dropped call, the first of this order that applies.

1. `internal` (not an agent's call), `forced` (a stored answer, repeated in a branch), `no_boundary` (its agent could not
   determine its rollout), `no_rollout` (its caller named no rollout, as in a request by hand), `not_selected` (not of the chosen
   agents), `other_policy` (not of the chosen policies), `untrusted` (sent with an agent's token instead of the policy server's),
   `unsigned` (its caller named a rollout without the signature of the runner that began it), `title` (it asks for a
   conversation's title)
2. `not_selected`, `validation`, `superseded_by_retry`, `id_collision` (distinct spans of its trace have the same ids),
   `attempt_conflict` (two runs have its id and attempt), `unfinished`, the rollout's status if it is not ok and has no reward,
   `judge_error`, `reward_unclear` (which call a reward belongs to is unknown), `reward_out_of_range`, `untrusted_reward` (its
   only rewards are untrusted), `invalid_reward` (a score is no finite number), `no_reward`
3. `redacted`, `ended_by_server`, `incomplete`, `overlong` (if such calls are masked), `not_delivered`,
   `attributes_dropped`, `multimodal`, `constrained` (its constraint is unknown) or `constrained:NAME` (it cannot be replayed),
   `greedy`, `sampling_truncated`, `unstated_sampling`
4. `deleted` (from the store during the build), `no_token_ids`, `no_logprobs`, `invalid_logprobs` (NaN or infinite),
   `mixed_versions`, `stale`, `too_long`, `unused_choice` (choices.py)
5. `singleton_group`, `zero_spread_group`: the call is sound, but its rollout has nothing to be compared with
The ledger counts `late_after_consumed`, for calls of rollouts that an earlier dataset used. `group_unfinished` is for sound
calls whose group is waiting (waiting.py).
"""

import json
from collections.abc import Sequence
from typing import Final, TypeAlias

import polars as pl

from trainspan_processing.reasons.overlong import is_overlong
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry import keys

__all__ = [
    "GROUP_REASONS",
    "UNSIGNED",
    "UNTRUSTED",
    "UNTRUSTED_REWARD",
    "admitted_reasons",
    "call_reason",
    "early_reason",
    "judged_others",
    "rollout_reason",
    "token_reason",
]

GROUP_REASONS: Final = ("singleton_group", "zero_spread_group")

UNSIGNED: Final = "unsigned"
UNTRUSTED: Final = "untrusted"
UNTRUSTED_REWARD: Final = "untrusted_reward"

_TITLE: Final = "title"
_ADMISSIBLE: Final = (UNSIGNED, _TITLE, "unstated_sampling", UNTRUSTED, UNTRUSTED_REWARD)
_CUT_OFF: Final = ["abort", "cancelled", "error", "incomplete"]
_EVERY_TOKEN: Final = 1 << 20
"""No model has more tokens: of calls that a client recorded, the vocabulary is unknown (the policy server records 0 instead)."""
_GREEDY_BELOW: Final = 1e-5  # vLLM samples greedily below this temperature


_Rule: TypeAlias = tuple[str | pl.Expr, pl.Expr]
"""A reason, or a column that contains it, and the condition under which it applies."""


_OF_IDENTITY: Final[Sequence[_Rule]] = (
    ("id_collision", pl.col("collides")),
    ("attempt_conflict", pl.col("conflicts")),
)
_OF_REWARDS: Final[Sequence[_Rule]] = (
    ("judge_error", pl.col("reward_failed")),
    ("reward_unclear", pl.col("reward_unclear")),
    ("reward_out_of_range", pl.col("reward_outside")),
    (UNTRUSTED_REWARD, pl.col("reward").is_null() & pl.col("reward_untrusted")),
    ("invalid_reward", pl.col("reward_invalid")),
    ("no_reward", pl.col("reward").is_null()),
)


def _first(rules: Sequence[_Rule]) -> pl.Expr:
    """The name of the first rule that holds, else NULL."""
    expressions = [(pl.lit(name) if isinstance(name, str) else name, condition) for name, condition in rules]
    return pl.coalesce([pl.when(condition.fill_null(False)).then(name) for name, condition in expressions])


def early_reason() -> pl.Expr:
    """Reason of a rollout (the rollout table with `selected`) that does not depend on how it ended."""
    early = [
        ("not_selected", ~pl.col("selected")),
        ("validation", pl.col("split") == "val"),
        ("superseded_by_retry", pl.col("superseded")),
        *_OF_IDENTITY,
        ("unfinished", ~pl.col("complete")),
    ]
    return _first(early)


def rollout_reason() -> pl.Expr:
    """Reason of a rollout, NULL if it may be trained.

    The frame is the rollout table with `reward`, `reward_failed`, `reward_unclear`, `reward_outside`, `reward_untrusted`,
    `reward_invalid`, and `teaches`: it is ok or has a reward in spite of its status.
    """
    status = pl.when(~pl.col("teaches")).then(pl.col("status"))
    return pl.coalesce(early_reason(), status, _first(_OF_REWARDS))


def reward_refusal() -> pl.Expr:
    """Why a rollout's reward counts nowhere, however it ended and whatever it is for: its id is not its own, or the reward is missing
    or cannot be used. The frame is that of `rollout_reason`."""
    return _first([*_OF_IDENTITY, *_OF_REWARDS])


def admitted_reasons(text: str | None) -> frozenset[str]:
    """The reasons that the user admits, from `[dataset] admit`. Raises UsageError for a reason that cannot be admitted."""
    names = frozenset(name.strip() for name in (text or "").split(",") if name.strip())
    if unknown := sorted(names - set(_ADMISSIBLE)):
        raise UsageError(f"admit = {unknown[0]!r} is not admissible: use one of {', '.join(_ADMISSIBLE)}")
    return names


def call_reason(admitted: frozenset[str] = frozenset(), *, mask_overlong: bool = False) -> pl.Expr:
    """Reason of a call (CALLS of an index with `rollout_reason`), if found without tokens."""
    temperature = pl.col("temperature")
    truncated = (
        (pl.col("top_p") < 1)
        | ((pl.col("top_k") > 0) & (pl.col("top_k") < _EVERY_TOKEN))
        | (pl.col("min_p") > 0)
        | (pl.col("frequency_penalty") != 0)
        | (pl.col("presence_penalty") != 0)
        | (pl.col("repetition_penalty") != 1)
    )
    whose: list[_Rule] = [
        ("internal", pl.col("internal")),
        ("forced", pl.col("forced")),
        ("no_boundary", pl.col("no_boundary")),
        ("no_rollout", pl.col("rollout_id").is_null()),
        ("not_selected", ~pl.col("selected")),
        ("other_policy", pl.col("other_policy")),
        (UNTRUSTED, pl.col("untrusted")),
        (UNSIGNED, pl.col("is_unsigned")),
        (_TITLE, pl.col("call_kind") == "title"),
    ]
    how: list[_Rule] = [
        ("redacted", pl.col("redacted")),
        ("ended_by_server", pl.col("finish_reason") == keys.ENDED_BY_SERVER),
        ("incomplete", pl.col("finish_reason").is_in(_CUT_OFF) | pl.col("finish_reason").is_null()),
        ("overlong", is_overlong() & mask_overlong),
        ("not_delivered", ~pl.col("delivered")),
        ("attributes_dropped", pl.col("dropped_attributes") > 0),
        ("multimodal", pl.col("multimodal")),
        (pl.col("obstacle"), pl.col("obstacle").is_not_null()),
        ("greedy", temperature < _GREEDY_BELOW),
        # Including penalties: they change the distribution in a way that the trainer cannot reproduce.
        ("sampling_truncated", truncated),
        ("unstated_sampling", pl.col("sampling_unstated")),
    ]
    whose, how = ([rule for rule in rules if not _is_admitted(rule, admitted)] for rules in (whose, how))
    return pl.coalesce(_first(whose), pl.col("rollout_reason"), _first(how))


def _is_admitted(rule: _Rule, admitted: frozenset[str]) -> bool:
    return isinstance(rule[0], str) and rule[0] in admitted


def token_reason(newest_version: int | None, max_staleness: int | None, max_tokens: int | None) -> pl.Expr:
    """Reason of a call that is found from its tokens (CALLS joined with TOKENS)."""
    completion, logprobs = pl.col("completion_ids"), pl.col("logprobs")
    finite = logprobs.list.eval(pl.element().is_finite()).list.all()
    # Raw log-probabilities are at temperature 1, whatever the sampling temperature; an unknown mode may be raw.
    of_sampled = (pl.col("logprobs_mode") == "processed").fill_null(False) | (pl.col("temperature") == 1.0)
    has_row = pl.col("prompt_ids").is_not_null() | completion.is_not_null()
    rules = [
        ("deleted", (pl.col("n_tokens") > 0) & ~has_row),
        (
            "no_token_ids",
            (pl.col("prompt_ids").list.len().fill_null(0) == 0) | (completion.list.len().fill_null(0) == 0),
        ),
        ("no_logprobs", (logprobs.list.len() != completion.list.len()).fill_null(True) | ~of_sampled),
        ("invalid_logprobs", ~finite),
        ("mixed_versions", ~_spans_are_exact()),
    ]
    if max_staleness is not None and newest_version is not None:
        oldest = newest_version - max_staleness
        rules.append(("stale", pl.col("policy_version").is_null() | (pl.col("policy_version") < oldest)))
    if max_tokens is not None:
        rules.append(("too_long", pl.col("prompt_ids").list.len() + completion.list.len() > max_tokens))
    return _first(rules)


def _spans_are_exact() -> pl.Expr:
    """Whether `policy_version_spans`, if given, is [[version, first, end], …] over the whole completion."""
    return (
        pl.when(pl.col("policy_version_spans").is_not_null())
        .then(
            pl.struct("policy_version_spans", pl.col("completion_ids").list.len().alias("length")).map_batches(
                lambda rows: pl.Series([_covers(row) for row in rows], dtype=pl.Boolean), return_dtype=pl.Boolean
            )
        )
        .otherwise(True)
    )


def _covers(row: dict[str, object]) -> bool:
    text = row["policy_version_spans"]
    if not isinstance(text, str):
        return True
    try:
        spans = [(int(version), int(first), int(end)) for version, first, end in json.loads(text)]
    except (ValueError, TypeError):
        return False
    edges = [0, *(end for _, _, end in spans)]
    return (
        all(first == edge < end for (_, first, end), edge in zip(spans, edges, strict=False))
        and edges[-1] == row["length"]
    )


def judged_others(others: pl.DataFrame, *, any_call: bool) -> pl.DataFrame:
    """The calls without tokens, with their `reason`. A call to a foreign model is `not_selected`; if no call has tokens
    (`any_call` is false), it is judged like a call of our own, which lacks tokens."""
    is_foreign = pl.lit(any_call) & ~pl.col("is_bare_call")
    reason = (
        pl.when(is_foreign)
        .then(pl.lit("not_selected"))
        .when(pl.col("redacted").fill_null(False))
        .then(pl.lit("redacted"))
        .when(pl.col("rollout_id").is_null())
        .then(pl.lit("no_rollout"))
        .otherwise(pl.coalesce("rollout_reason", pl.lit("no_token_ids")))
    )
    return others.select(*ROLLOUT_KEY, *SPAN_KEY, "agent", reason.alias("reason"))

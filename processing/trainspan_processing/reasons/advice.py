"""Advice for each reason for which calls are dropped."""

from collections.abc import Mapping
from typing import Final

from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.status import DropReason, without_detail

__all__ = ["ADVICE", "NO_ROLLOUT_NAMED", "advice_on"]

NO_ROLLOUT_NAMED: Final = (
    "run the agent with `trainspan rollout`, or under `opentelemetry-instrument` where trainspan is installed; traces that you "
    "already have in files become rollouts with `trainspan import FILE` (docs/import.md), and those that another tracer sent here if "
    f"the root span of each is sent again with the attributes {keys.ROLLOUT_ID} = an id of its own and {keys.ROLLOUT_STATUS} = "
    f'"ok", and with an event {keys.EVALUATION_EVENT} that has its reward ({keys.EVALUATION_NAME} = "reward", {keys.EVALUATION_SCORE})'
)
"""What to do about spans that name no rollout."""

ADVICE: Final[dict[DropReason, str]] = {
    "unfinished": "spans are missing or have not arrived yet: wait with --wait-s 30, and make sure that every agent process "
    "ends normally and exports to this collector",
    "group_unfinished": "the last rollouts of their tasks have not arrived: build again later, wait with --wait-s 60, or lower "
    "[advanced] dataset.group_wait_s",
    "agent_error": 'the agent crashed: see `trainspan sql "SELECT rollout_id, status FROM rollouts"` and its output',
    "context_overflow": "prompts outgrew the context: raise [serving] max_model_len, or let the agent compact its history earlier",
    "timeout": "the agent ran out of time: raise [rollouts] timeout_s",
    "cancelled": "the rollouts were cancelled: run them again",
    "infra_error": "the policy server or another service failed: run the rollouts again",
    "judge_error": "the judge or reward function raised an error: run it by hand on one of these rollouts",
    "diverged": "branches did not repeat the calls of the rollout that they branch from: the agent depends on the clock, on "
    "chance or on the outer world; `trainspan branch` shows the first token that differed",
    "id_collision": "distinct spans have the same ids, so that they cannot be told apart: the program seeds the randomness that its "
    "OpenTelemetry makes ids from; leave that out, or set OTEL_PYTHON_ID_GENERATOR to a generator that no seed reaches",
    "attempt_conflict": "two runs have the same rollout id and attempt, so that their calls and rewards cannot be told apart: give "
    "each run an id or an attempt of its own",
    "reward_unclear": "it is unknown which call a reward belongs to, because the agent's clock may differ from the policy server's: use "
    'trainspan.reward(…, of="call"), name the response (gen_ai.response.id) in the event, or instrument the HTTP client; credit = '
    '"identical" does not need it',
    "no_reward": "call trainspan.reward(…) in the agent, or pass --judge to `trainspan rollout`, or --reward module:function here",
    "reward_out_of_range": "rewards, or their sums, are beyond [advanced] dataset.max_reward: scale the judge's or the agent's scores, or "
    "raise it",
    "invalid_reward": "the score of a reward is text, true or false, NaN or infinite, or missing: send a finite number as "
    "gen_ai.evaluation.score.value",
    "incomplete": "answers were cut off before a finish reason: see the policy server's log",
    "overlong": "calls reached their length limit, and [dataset] overlong masks them: raise the agent's max_tokens, or set overlong = keep",
    "not_delivered": "clients disconnected before the answer was complete: raise their timeout",
    "ended_by_server": "a weight swap or sleep request ended calls that took longer than [advanced] serving.drain_timeout_s: raise "
    "it, or lower the agent's max_tokens",
    "superseded_by_retry": "only the last attempts are trained: find out why they were retried",
    "deleted": "retention or a purge deleted these calls while the dataset was built: raise [collector] retention_days, or build sooner",
    "no_token_ids": "the server recorded no token ids: serve the policy with `trainspan serve`; calls that only a client recorded, "
    "such as a vendor's or imported ones, are for `trainspan sft` and `trainspan export`",
    "no_logprobs": "the server recorded no log-probabilities of the distribution that it sampled from: serve the policy with "
    "`trainspan serve`",
    "invalid_logprobs": "the policy's log-probabilities were NaN or infinite: its weights or its numbers broke down; put an earlier "
    "version back (`trainspan swap`), or serve with a wider dtype",
    "greedy": "calls were sampled at temperature 0: set temperature=1 in the agent, or serve with --train-sampling",
    "sampling_truncated": "top_p, top_k, min_p or a penalty changed the sampling distribution: leave them out, or serve with "
    "--train-sampling",
    "unstated_sampling": "a client recorded these calls, and the request does not state how they were sampled: send temperature=1, "
    "top_p=1, top_k=-1, min_p=0 and repetition_penalty=1, or pass --admit unstated_sampling if these are the server's defaults",
    "constrained": "the constraint was not recorded, or cannot be replayed: serve the policy with `trainspan serve` and vLLM's "
    "xgrammar, and avoid the feature named after the colon",
    "mixed_versions": "calls span weight swaps without exact boundaries: serve them with `trainspan serve`, which records these",
    "attributes_dropped": "span attributes were cut: raise OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT and unset length limits",
    "redacted": "redaction removed what training needs: narrow the blocked keys",
    "untrusted": "these calls were sent without the policy server's token: serve with the collector's $TRAINSPAN_HOME, or set "
    "[serving] token_file; if agents that you trust recorded them (TRAINSPAN_CAPTURE=client), pass --admit untrusted",
    "untrusted_reward": "the rewards were sent by a process that the collector does not trust: run the agent with the collector's "
    "$TRAINSPAN_HOME or through `trainspan rollout`, or pass --admit untrusted_reward",
    "unsigned": "callers named a runner's rollouts without its signature: give the policy server the runner's key ([serving] "
    "signing_key_file), and pass on `baggage` or the whole base URL if an agent makes its own requests",
    "stale": "calls are older than --max-staleness versions: raise it, or collect with the current policy",
    "too_long": "calls are longer than --max-tokens: raise it, or shorten the agent's prompts",
    "unused_choice": "the agent continued with another answer to the same request: --choices all also trains on these",
    "internal": "only internal requests were found: run the agent",
    "forced": "branches repeat these calls of other rollouts, which are trained there",
    "multimodal": "calls with images or audio cannot be trained",
    "title": "calls that ask for a conversation's title are no work on the task; --admit title trains them too",
    "not_selected": "no selected agent made these calls, or their model is not the policy",
    "other_policy": "other policies answered these calls: check the names in [policies.NAME] agents against the agents that "
    "`trainspan explain` shows",
    "validation": "rollouts of split val are never trained: run `trainspan rollout --split train`",
    "late_after_consumed": "these calls arrived after a dataset had used their rollouts: raise --wait-s",
    "zero_spread_group": "all rollouts of each task got the same reward: use harder or easier tasks, more rollouts per task "
    "(--n), or --baseline running",
    "singleton_group": "each task has only one rollout: run more with `trainspan rollout --n 8`, or use --baseline running",
    "no_boundary": "nothing marks the end of a rollout of the web agent: install trainspan[web] there, or put each task into "
    "`with trainspan.rollout():`",
    "no_rollout": "their callers named no rollout. This is fine for requests made by hand; run an agent under "
    "`opentelemetry-instrument`, through `trainspan rollout` (the way for programs not in Python), or with the base URL http://HOST:8000/rollout/{token}/v1",
}
"""Drop reason → advice to the user."""


def advice_on(reason: str) -> str | None:
    """Advice for a reason, which may have a detail after a colon; None if there is no advice."""
    known: Mapping[str, str] = {str(name): text for name, text in ADVICE.items()}
    return known.get(without_detail(reason))

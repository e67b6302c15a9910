"""Attribute keys of spans, events and log records.

Names are `gen_ai.*` if OpenTelemetry's GenAI semantic conventions define them, otherwise `trainspan.*`.
The constants in `opentelemetry.semconv` for `gen_ai` are deprecated (the conventions moved to their own repository),
hence this table.
"""

from typing import Final

# Identity, on every span of a rollout.
RUN_ID: Final = "trainspan.run.id"
ROLLOUT_ID: Final = "trainspan.rollout.id"
TASK_ID: Final = "trainspan.task.id"
ATTEMPT: Final = "trainspan.attempt"  # int, from 0
ROUND: Final = "trainspan.round"  # int
SPLIT: Final = "trainspan.split"  # "train" | "val"

# The rollout's own span (runner, explicit block or process), recognized by ROLLOUT_STATUS.
ROLLOUT_STATUS: Final = "trainspan.rollout.status"
ROLLOUT_CALLS: Final = "trainspan.rollout.calls"  # int: successful calls seen by the agent's side, if known
SERVED_CALLS: Final = (
    "trainspan.rollout.served_calls"  # int: calls that the policy servers began, as they told the runner
)
ROLLOUT_BOUNDARY: Final = "trainspan.rollout.boundary"  # "runner" | "explicit" | "request" | "process" | "imported"
IMPORTED_FROM: Final = "trainspan.imported.from"  # str: the format of the file that `trainspan import` read
ROLLOUT_SIGNED: Final = "trainspan.rollout.signed"  # true: the runner signed what it passed to the agent
ROLLOUT_JUDGE: Final = "trainspan.rollout.judge"  # "module:function"; then only evaluations of source "judge" count
ROLLOUT_OWN_REWARD: Final = (
    "trainspan.rollout.own_reward"  # true: the runner has no judge, the agent's own rewards count
)
TASK_ANSWER: Final = "trainspan.task.answer"  # JSON: the task's answer, on the runner's rollout span
GROUP_SIZE: Final = "trainspan.group.size"  # int: the runner's rollouts of this task in this round
BRANCH_OF: Final = "trainspan.branch.of"  # id of the rollout that this one branches from
BRANCH_ATTEMPT: Final = "trainspan.branch.attempt"  # int: its attempt
BRANCH_CALL: Final = (
    "trainspan.branch.call"  # int: position of the call that is sampled anew; those before are repeated
)
ROLLOUT_SPAN_NAME: Final = "trainspan.rollout"

# A call, emitted by the policy server as span `chat {model}` of kind SERVER.
PROMPT_TOKEN_IDS: Final = "trainspan.prompt.token_ids"  # bytes, int32 little-endian
COMPLETION_TOKEN_IDS: Final = "trainspan.completion.token_ids"  # bytes, int32 little-endian
COMPLETION_LOGPROBS: Final = "trainspan.completion.logprobs"  # bytes, float32 little-endian
LOGPROBS_MODE: Final = "trainspan.logprobs.mode"  # "processed" | "raw"
SAMPLING_CONSTRAINED: Final = "trainspan.sampling.constrained"  # bool
SAMPLING_CONSTRAINT: Final = "trainspan.sampling.constraint"  # JSON, see constraints.Constraint
CONSTRAINT_START: Final = (
    "trainspan.sampling.constraint_start"  # int: tokens before the first one that a grammar masked
)
POLICY_NAME: Final = "trainspan.policy.name"
POLICY_BASE: Final = "trainspan.policy.base"  # hex digest of the model that training began with (checkpoint.py)
POLICY_VERSION: Final = "trainspan.policy.version"  # int; the oldest one of a call with tokens of several
POLICY_VERSION_SPANS: Final = "trainspan.policy.version_spans"  # JSON [[version, first token, end token], …]
POLICY_SWAP_CACHE: Final = (
    "trainspan.policy.swap_cache"  # "recomputed": at a swap, keys and values of earlier tokens were computed again
)
CACHE_RECOMPUTED: Final = "recomputed"
CALL_INDEX: Final = "trainspan.call.index"  # int, counter per rollout and server, given at request start
CALL_SIGNED: Final = "trainspan.call.signed"  # bool: the identity or URL that the caller used was the runner's
CALL_SERVER: Final = "trainspan.call.server"  # 32 hex digits: the server that counted the index
CALL_DELIVERED: Final = "trainspan.call.delivered"  # bool: the client received the whole answer
CALL_FORCED: Final = "trainspan.call.forced"  # bool: answered with stored tokens, as the branch of another rollout
CALL_SAME_CLOCK: Final = "trainspan.call.same_clock"  # bool: the caller stated the CLOCK of the server
CALL_INTERNAL: Final = "trainspan.call.internal"  # bool: canary and other requests by trainspan itself
CALL_RECORDED_BY: Final = "trainspan.call.recorded_by"  # "client": by the agent's side, from another server
CALL_LACKS: Final = "trainspan.call.lacks"  # str[] of "token_ids", "logprobs": missing in that server's answer
CALL_MULTIMODAL: Final = "trainspan.call.multimodal"  # bool
CALL_KIND: Final = "trainspan.call.kind"  # "sub_agent" | "summary" | "title" | "other": what the request itself shows
CALL_KIND_RULE: Final = "trainspan.call.kind_rule"  # str: how it shows that
CALL_TOOL_CALLS: Final = (
    "trainspan.call.tool_calls"  # str[]: ids of the tool calls in the answer, as its client got them
)
CALL_TOOL_RESULTS: Final = "trainspan.call.tool_results"  # JSON, see tools.ToolResult: results that the request brought
CALL_ENDPOINT: Final = "trainspan.call.endpoint"  # request path, e.g. "/v1/chat/completions"
CHOICE_INDEX: Final = "trainspan.choice.index"  # int
LAST_CALL: Final = (
    "trainspan.call.last"  # 16 hex digits: span id of the call that came back last in the agent's process
)
CLOCK: Final = "trainspan.clock"  # baggage only: the sender's clock (clock.py)
SIGNATURE: Final = "trainspan.signature"  # baggage only: the runner's signature on the identity
URL_SIGNATURE: Final = "trainspan.signature.url"  # baggage only: the same on the rollout's trace, for base URLs
STATE_KEY: Final = "trainspan.state.key"  # str, the user's state for step-level grouping
REDACTED: Final = "trainspan.redacted"  # str[]: blocked keys that the collector removed from this span, event or record
NO_BOUNDARY: Final = "trainspan.no_boundary"  # bool: rollouts cannot be told apart

USER_AGENT: Final = "user_agent.original"  # the program that made the request

GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"  # str[]
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_AGENT_NAME: Final = "gen_ai.agent.name"
GEN_AI_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_MIN_P: Final = "gen_ai.request.min_p"
GEN_AI_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_REPETITION_PENALTY: Final = "gen_ai.request.repetition_penalty"
GEN_AI_SEED: Final = "gen_ai.request.seed"
GEN_AI_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
ASKED_MAX_TOKENS: Final = (
    "trainspan.request.max_tokens"  # int: what the client asked for, if the context left room for less
)
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
GEN_AI_SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"  # parts of a separate system message
GEN_AI_TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"

# Rewards: the standard event, as a span event or a log record.
EVALUATION_EVENT: Final = "gen_ai.evaluation.result"
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"  # int or double
EVALUATION_LABEL: Final = "gen_ai.evaluation.score.label"
EVALUATION_EXPLANATION: Final = "gen_ai.evaluation.explanation"
EVALUATION_ID: Final = "trainspan.evaluation.id"
EVALUATION_SOURCE: Final = "trainspan.evaluation.source"  # "judge" | "return" | "agent" | "human" | "label"
EVALUATION_OF: Final = "trainspan.evaluation.of"  # "rollout" | "call"

# Labels: evaluations that a person gave through the runner's token (labels.py), with the attributes below.
LABEL: Final = "label"  # their source, and the name of those of one rollout or call
PREFERENCE: Final = "preference"  # the name of those that say which of two rollouts is better, one on each of them
LABELED_BY: Final = "trainspan.label.by"  # str: who gave it
LABEL_OTHER: Final = "trainspan.label.other"  # str: id of the rollout that it is compared with
LABEL_OTHER_ATTEMPT: Final = "trainspan.label.other.attempt"  # int
LABEL_PLACE: Final = "trainspan.label.place"  # int: place at which it was shown beside the other, from 0

# Measurements by branches: evaluations of a call that are never rewards, with the attributes below.
STATE_VALUE: Final = "trainspan.value"  # mean reward of branches from the state before the call
START_VALUE: Final = "trainspan.start_value"  # mean reward of the rollout's group: the value before its first call
CALL_ADVANTAGE: Final = "trainspan.advantage"  # value of the state after the call less that of the state before it
MEASUREMENTS: Final = (STATE_VALUE, START_VALUE, CALL_ADVANTAGE)
INTERVAL_LOW: Final = "trainspan.interval.low"  # double: lower end of the score's 95 % interval
INTERVAL_HIGH: Final = "trainspan.interval.high"  # double
MEASURED_BY: Final = "trainspan.measured.run"  # id of the run of the branches
MEASURED_ROLLOUTS: Final = "trainspan.measured.rollouts"  # int: rewarded rollouts that the value before the call is of
MEASURED_STATUS: Final = (
    "trainspan.measured.status"  # str[] of "STATUS COUNT": the branches from the state before the call
)
MEASURED_REWARD: Final = "trainspan.measured.reward"  # str[] of "SETTING=VALUE": what made the rewards
MEASURED_DIVERGED: Final = "trainspan.measured.diverged"  # int: branches that did not reach the state before the call
MEASURED_POLICIES: Final = "trainspan.measured.policies"  # str[] of "NAME VERSION": what sampled the branches

REWARD: Final = "reward"  # the evaluation name that is the reward by default

ENDED_BY_SERVER: Final = (
    "ended_by_server"  # finish reason of a call that the server ended to exchange weights or to sleep
)

OPERATION_CHAT: Final = "chat"
OPERATION_TEXT_COMPLETION: Final = "text_completion"
OPERATION_INVOKE_AGENT: Final = "invoke_agent"
OPERATION_EXECUTE_TOOL: Final = "execute_tool"

# HTTP between agent and policy server.
HEADER_POLICY_VERSION: Final = "x-trainspan-policy-version"
HEADER_POLICY: Final = "x-trainspan-policy"
HEADER_CALL: Final = "x-trainspan-call"  # 16 hex digits: span id of the call that a response answers
ROLLOUT_PATH_PREFIX: Final = "/rollout/"  # /rollout/{traceparent}/v1/…
API_KEY_PREFIX: Final = "trainspan-"  # trainspan-{traceparent}[-{secret}]

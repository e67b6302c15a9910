"""Calls answered with stored tokens by a real policy server: the response is the original one, and nothing is computed."""

import concurrent.futures
import json
from typing import Any

import pytest

from tests.serving.forcing.branches import Rollout, anonymous, calls_of, prefix_of
from tests.serving.support.servers import Stack
from trainspan_schemas.telemetry import keys

pytestmark = pytest.mark.usefixtures("base_policy")

MESSAGES: list[dict[str, str]] = [{"role": "system", "content": "calc"}, {"role": "user", "content": "7*5?"}]
SIDE = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
TOOL = {"type": "function", "function": {"name": "turn", "parameters": {**SIDE, "additionalProperties": False}}}
CHAT, COMPLETIONS, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 24}),
    "chat stream": (CHAT, {"messages": MESSAGES, "max_tokens": 24, "stream": True}),
    "chat stream with usage": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 24, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "two choices": (CHAT, {"messages": MESSAGES, "max_tokens": 24, "n": 2}),
    "log-probabilities": (CHAT, {"messages": MESSAGES, "max_tokens": 24, "logprobs": True}),
    "ids": (CHAT, {"messages": MESSAGES, "max_tokens": 24, "return_token_ids": True}),
    "a required tool": (CHAT, {"messages": MESSAGES, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}),
    "a required tool, streamed": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required", "stream": True},
    ),
    "a stop string": (CHAT, {"messages": MESSAGES, "max_tokens": 200, "stop": ["e", "1", "o"]}),
    "a stop string, streamed": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 200, "stop": ["ab", "e", "o"], "stream": True},
    ),
    "a stop token": (CHAT, {"messages": MESSAGES, "max_tokens": 200, "stop_token_ids": list(range(30, 60))}),
    "completion": (COMPLETIONS, {"prompt": "7*5", "max_tokens": 24, "n": 2, "logprobs": 0}),
    "completion with its prompt": (COMPLETIONS, {"prompt": "7*5", "max_tokens": 24, "echo": True}),
    "two prompts": (COMPLETIONS, {"prompt": ["7*5", "one"], "max_tokens": 24}),
    "two prompts, streamed": (COMPLETIONS, {"prompt": ["7*5", "7*5"], "max_tokens": 24, "stream": True, "n": 2}),
    "response": (RESPONSES, {"input": "7*5", "max_output_tokens": 24}),
    "response stream": (RESPONSES, {"input": "7*5", "max_output_tokens": 24, "stream": True}),
    "anthropic": (ANTHROPIC, {"messages": MESSAGES[1:], "max_tokens": 24}),
    "anthropic stream": (ANTHROPIC, {"messages": MESSAGES[1:], "max_tokens": 24, "stream": True}),
}


def comparable(text: str) -> Any:
    """A response without ids and times. vLLM merges the tokens of a slow reader's stream into one event, so pieces are joined.

    A chunk that had nothing but pieces is left out: if the reader is slow enough, all pieces come with the last chunk.
    Streams of several choices interleave as the engine runs, so choices are compared one by one.
    """
    text = anonymous(text)
    if not text.startswith(("data: ", "event: ")):
        return text
    pieces: dict[str, str] = {}
    frames: list[str] = []
    for line in text.splitlines():
        if line.startswith("data: {"):
            value = _without_pieces(json.loads(line.removeprefix("data: ")), "", pieces)
            frame = json.dumps(value)
            frames += [frame] if frame not in frames and not _had_only_pieces(value) else []
    return pieces, sorted(frames)


def _had_only_pieces(frame: dict[str, Any]) -> bool:
    """Whether nothing but empty fields is left in each choice of an OpenAI chunk."""
    choices = frame.get("choices", [])
    return bool(choices) and not any(choice[key] for choice in choices for key in choice if key != "index")


def _without_pieces(value: Any, path: str, pieces: dict[str, str]) -> Any:
    """The value with its pieces of text moved to `pieces`, by the place of the choice that they belong to."""
    if isinstance(value, list):
        return [_without_pieces(item, f"{path}[]", pieces) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type", "")  # only the first event of a tool has its type
    path += f"({'' if kind == 'function' else kind}{value.get('index', '')})"
    kept = {key: _without_pieces(item, f"{path}.{key}", pieces) for key, item in value.items()}
    for key in ("content", "text", "delta", "arguments", "partial_json"):
        if isinstance(value.get(key), str):
            pieces[f"{path}.{key}"] = pieces.get(f"{path}.{key}", "") + kept.pop(key)
        elif key in value and value[key] is None:
            kept.pop(key)
    for key in ("sequence_number", "token_ids"):
        kept.pop(key, None)
    # The name of a tool comes with the first pieces of its arguments or before, the last pieces with the finish reason or before.
    for tool in kept.pop("tool_calls", None) or []:
        if any(tool[key] for key in tool if key != "index"):
            pieces[f"{path}.tool"] = pieces.get(f"{path}.tool", "") + json.dumps(tool)
    return kept


def test_a_forced_answer_is_byte_for_byte_the_original_on_every_endpoint(stack: Stack) -> None:
    original, branch = Rollout(stack), Rollout(stack)
    first = {name: original.ask(path, body) for name, (path, body) in REQUESTS.items()}
    assert {name: status for name, (status, _) in first.items() if status != 200} == {}
    spans = original.spans(len(REQUESTS) + 6)
    calls = calls_of(spans)
    branch.register(prefix_of(branch, calls, len(calls)))
    asked = stack.server.policy()["forced_requests"]
    again = {name: branch.ask(path, body) for name, (path, body) in REQUESTS.items()}
    for name in REQUESTS:
        assert again[name][0] == 200, (name, again[name])
        assert comparable(again[name][1]) == comparable(first[name][1]), name
    assert stack.server.policy()["forced_requests"] - asked == len(REQUESTS) + 2
    forced = branch.spans(len(spans))
    assert all(span.attributes[keys.CALL_FORCED] and span.attributes[keys.CALL_DELIVERED] for span in forced)
    for one, other in zip(spans, forced, strict=True):
        same = (
            keys.PROMPT_TOKEN_IDS,
            keys.COMPLETION_TOKEN_IDS,
            keys.COMPLETION_LOGPROBS,
            keys.GEN_AI_FINISH_REASONS,
            keys.CALL_INDEX,
            keys.CHOICE_INDEX,
            keys.POLICY_VERSION,
            keys.GEN_AI_TEMPERATURE,
        )
        assert [one.attributes[key] for key in same] == [other.attributes[key] for key in same]
    assert not any(keys.CALL_FORCED in span.attributes for span in spans)
    assert branch.end() == {"forced": len(spans), "missing": 0, "sampled": 0, "diverged": None}


def conversation(rollout: Rollout, turns: int) -> list[tuple[int, str]]:
    """A deterministic agent: it repeats each answer and asks on."""
    messages, answers = list(MESSAGES), []
    for turn in range(turns):
        status, text = rollout.ask(CHAT, {"messages": messages, "max_tokens": 12})
        answers.append((status, text))
        if status != 200:
            break
        said = json.loads(text)["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": f"and {turn}?"}]
    return answers


def test_a_branch_repeats_the_first_calls_and_then_samples_also_after_a_swap(stack: Stack) -> None:
    original, branch = Rollout(stack), Rollout(stack)
    first = conversation(original, 4)
    calls = calls_of(original.spans(4))
    branch.register(prefix_of(branch, calls, 2))
    assert stack.server.swap("policy-000001", 1)[0] == 200
    again = conversation(branch, 4)
    assert [anonymous(text) for _, text in again[:2]] == [anonymous(text) for _, text in first[:2]]
    spans = branch.spans(4)
    assert [keys.CALL_FORCED in span.attributes for span in spans] == [True, True, False, False]
    assert [span.attributes[keys.POLICY_VERSION] for span in spans] == [0, 0, 1, 1]
    assert spans[2].attributes[keys.PROMPT_TOKEN_IDS] == calls[2].prompt
    assert spans[2].attributes[keys.COMPLETION_TOKEN_IDS] != calls[2].choices[0].ids
    assert branch.end() == {"forced": 2, "missing": 0, "sampled": 2, "diverged": None}


@pytest.mark.parametrize("stream", [False, True])
def test_another_prompt_ends_the_branch_with_an_error_that_names_call_and_token(stack: Stack, stream: bool) -> None:
    original, branch = Rollout(stack), Rollout(stack)
    conversation(original, 3)
    calls = calls_of(original.spans(3))
    branch.register(prefix_of(branch, calls, 2))
    assert branch.ask(CHAT, {"messages": MESSAGES, "max_tokens": 12})[0] == 200
    other = {"messages": [MESSAGES[0], {"role": "user", "content": "7*6?"}], "max_tokens": 12, "stream": stream}
    status, text, headers = branch.send(
        CHAT, json.dumps({"model": "policy", **other}).encode(), {"baggage": branch.identity.to_baggage()}
    )
    assert (status, headers["x-should-retry"]) == (422, "false")
    message = json.loads(text)["error"]["message"]
    assert message.startswith("call 1: the prompt differs from the stored one at token ")
    assert "('6') instead of 23 ('5'), after '" in message
    # Nothing of this rollout is answered any more, not even the right prompt.
    assert branch.ask(CHAT, {"messages": MESSAGES, "max_tokens": 12})[0] == 422
    events = branch.ask("/v1/responses", {"input": "7*5", "stream": True})[1]
    assert events.count(json.dumps(message)) == 1, events
    diverged = stack.server.policy()["branches_diverged"]
    assert branch.end() == {"forced": 1, "missing": 1, "sampled": 0, "diverged": message}
    assert stack.server.policy()["branches_diverged"] == diverged + 1
    assert len(branch.spans(1)) == 1


def test_what_is_not_stored_is_not_made_up(stack: Stack) -> None:
    original = Rollout(stack)
    body = {"messages": MESSAGES, "max_tokens": 4}
    original.ask(CHAT, body)
    calls = calls_of(original.spans(1))
    for more, why in {
        "top_logprobs": "call 0: log-probabilities of other tokens than the sampled ones are not stored",
        "n": "call 0: 3 choices are asked for, 1 are stored",
    }.items():
        branch = Rollout(stack)
        branch.register(prefix_of(branch, calls, 1))
        asked = {"top_logprobs": {"logprobs": True, "top_logprobs": 2}, "n": {"n": 3}}[more]
        status, text = branch.ask(CHAT, {**body, **asked})
        assert (status, json.loads(text)["error"]["message"]) == (422, why)
        assert branch.end()["diverged"] == why


def test_parallel_agents_are_matched_by_their_prompts_and_in_order_among_equal_ones(stack: Stack) -> None:
    original, branch = Rollout(stack), Rollout(stack)
    bodies = [{"prompt": prompt, "max_tokens": 16} for prompt in ("a b c", "7*5", "7*5", "d e f")]
    first = [original.ask(COMPLETIONS, body)[1] for body in bodies]
    calls = calls_of(original.spans(4))
    branch.register(prefix_of(branch, calls, 3))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # the last one is the call that is sampled anew
        order = [3, 1, 0, 2]
        asked = {place: pool.submit(branch.ask, COMPLETIONS, bodies[place]) for place in order}
        again = {place: anonymous(future.result()[1]) for place, future in asked.items()}
    assert again[0] == anonymous(first[0])
    assert sorted(again[place] for place in (1, 2)) == sorted(anonymous(first[place]) for place in (1, 2))
    assert branch.end() == {"forced": 3, "missing": 0, "sampled": 1, "diverged": None}


def test_an_agent_that_takes_only_a_url_is_branched_too(stack: Stack) -> None:
    original, branch = Rollout(stack), Rollout(stack)
    body = {"messages": MESSAGES, "max_tokens": 12}
    _, first = original.ask(CHAT, body)
    calls = calls_of(original.spans(1))
    branch.register(prefix_of(branch, calls, 1))
    url = f"/rollout/{branch.parent}.{branch.identity.url_signature}/v1/chat/completions"
    assert anonymous(branch.ask(url, body, headers={})[1]) == anonymous(first)
    assert branch.end()["forced"] == 1

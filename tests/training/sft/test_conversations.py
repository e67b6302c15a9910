"""Rows: answers that continue one another share a row, nothing is dropped without a reason, and some rows are held out."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import CHATML
from trainspan_schemas.errors import DatasetError
from trainspan_training.model.loading import load_tokenizer
from trainspan_training.sft.data.conversations import Conversations, hold_out, make_rows
from trainspan_training.sft.data.examples import find_files, read_examples
from trainspan_training.sft.data.rendering import Renderer

Message = dict[str, Any]


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def dialog(question: str, *answers: str) -> list[Message]:
    messages = [said("user", question)]
    for answer in answers:
        messages += [said("assistant", answer), said("tool", f"result of {answer}")]
    return messages[:-1]


def as_export(messages: list[Message]) -> list[dict[str, Any]]:
    """The same conversation as `trainspan export sft` writes it: a line for each answer."""
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [{"prompt": messages[:index], "completion": [messages[index]]} for index in places]


@pytest.fixture
def rows_of(model_dir: Path, tmp_path: Path) -> Any:
    tokenizer = load_tokenizer(model_dir)

    def make(*lines: dict[str, Any], template: str = CHATML, **options: Any) -> Conversations:
        file = tmp_path / "data.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        chosen = {"max_length": 512} | options
        renderer = Renderer(tokenizer, frozenset([tokenizer.eos_token_id]), template)
        return make_rows(read_examples([file])[0], renderer, **chosen)

    return make


def trained(tokenizer_dir: Path, made: Conversations) -> list[list[str]]:
    """The trained text of each row, by answer."""
    tokenizer = load_tokenizer(tokenizer_dir)
    return [[tokenizer.decode(row.tokens[start : start + size]) for start, size in row.answers] for row in made.rows]


def test_messages_and_the_lines_of_an_export_give_the_same_rows(rows_of: Any, model_dir: Path) -> None:
    one, other = dialog("1+2*3", "calc 2*3", "calc 1+6", "answer 7"), dialog("4", "answer 4")
    whole = rows_of({"messages": one}, {"messages": other})
    lines = rows_of(*as_export(one), *as_export(other))
    expected = [["calc 2*3<|im_end|>", "calc 1+6<|im_end|>", "answer 7<|im_end|>"], ["answer 4<|im_end|>"]]
    assert trained(model_dir, whole) == trained(model_dir, lines) == expected
    assert [row.tokens.tolist() for row in whole.rows] == [row.tokens.tolist() for row in lines.rows]
    assert (whole.answers, whole.rewritten, whole.dropped) == (4, 0, {})


def test_agents_that_take_turns_keep_a_row_each(rows_of: Any, model_dir: Path) -> None:
    a, b = as_export(dialog("plan", "x", "y")), as_export(dialog("code", "u", "v"))
    made = rows_of(a[0], b[0], a[1], b[1])
    assert trained(model_dir, made) == [["x<|im_end|>", "y<|im_end|>"], ["u<|im_end|>", "v<|im_end|>"]]


def test_a_rewritten_history_is_counted_and_every_answer_still_trained_after_its_own_prompt(
    rows_of: Any, model_dir: Path
) -> None:
    forgets = CHATML.replace(
        "(message['content'] or '')", "('' if not loop.last and message.role == 'assistant' else message.content)"
    )
    for lines in ([{"messages": dialog("q", "one", "two")}], as_export(dialog("q", "one", "two"))):
        made = rows_of(*lines, template=forgets)
        assert trained(model_dir, made) == [["one<|im_end|>"], ["two<|im_end|>"]]
        assert made.rewritten == 1
        assert len(made.named["rewritten"]) == 1


def test_what_is_too_long_is_dropped_and_counted(rows_of: Any, model_dir: Path) -> None:
    lines = [{"messages": dialog("q", "short", "1234567890")}, {"messages": dialog("q" * 90, "never")}]
    (row,) = rows_of(*lines).rows[:1]
    limit = len(row.tokens) - 4
    dropped = rows_of(*lines, max_length=limit)
    assert trained(model_dir, dropped) == [["short<|im_end|>"]]
    assert (dict(dropped.dropped), dropped.named["too_long"]) == ({"too_long": 2}, ["data.jsonl:1", "data.jsonl:2"])


def test_the_loss_can_be_on_all_tokens(rows_of: Any) -> None:
    (row,) = rows_of({"messages": dialog("q", "a", "b")}, assistant_only=False).rows
    assert row.labels.tolist() == [-100, *row.tokens.tolist()[1:]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('{"text": "a"}', 'expected "prompt" and "completion", or "messages", found text'),
        ('{"messages": [{"content": "a"}]}', 'a message must be an object with a "role"'),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "content has a part that is no text"),
        ('{"messages": [], "tools": [{"name": "f"}]}', "a tool must be an object with a function that has a name"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "d.jsonl").write_text(line + "\n")
    with pytest.raises(DatasetError, match=f"d.jsonl, line 1.*{message}"):
        read_examples(find_files(tmp_path))


def test_held_out_conversations_share_no_first_prompt_with_the_trained_ones(rows_of: Any) -> None:
    lines = [{"messages": dialog(f"q{number % 20}", f"a{number}")} for number in range(40)]
    rows = rows_of(*lines).rows
    kept, held = hold_out(rows, 0.1, seed=1)
    assert (len(kept), len(held)) == (36, 4)
    assert not {row.group for row in kept} & {row.group for row in held}
    assert hold_out(rows, 0.0, seed=1) == (rows, [])
    assert len(hold_out(rows[:1], 0.5, seed=1)[0]) == 1
    assert [len(part) for part in hold_out(rows, 0.001, seed=1)] == [38, 2]


def test_a_first_prompt_counts_whether_its_answer_is_trained_or_not(rows_of: Any) -> None:
    lines = [{"messages": dialog("q", "" if number % 2 else f"a{number}", f"b{number}")} for number in range(6)]
    made = rows_of(*lines)
    assert (made.answers, made.dropped) == (9, {"no_answer": 3})
    assert len({row.group for row in made.rows}) == 1
    assert (
        len({row.group for row in rows_of(*({"prompt": "q", "completion": "a<|im_end|>"} for _ in range(2))).rows}) == 1
    )


def test_equal_conversations_are_not_rewritten_ones(rows_of: Any) -> None:
    made = rows_of(*({"messages": dialog("q", "a")} for _ in range(3)))
    assert (made.answers, made.rewritten) == (3, 0)


def test_the_answers_of_a_conversation_are_held_out_together_if_the_template_forgets_thoughts(rows_of: Any) -> None:
    """Also if agents take turns, and if the client does not send thoughts back."""
    thinks = CHATML.replace(
        "(message['content'] or '')",
        "(message.reasoning_content if loop.last and message.reasoning_content else '') + message.content",
    )
    lines: list[list[dict[str, Any]]] = []
    for number in range(20):
        lines.append(as_export(dialog(f"q{number}", "one", "two", "three")))
        for line in lines[-1]:
            line["completion"] = [{**line["completion"][0], "reasoning_content": "so"}]
    turns = zip(lines[::2], lines[1::2], strict=True)  # two agents at a time
    made = rows_of(*(line for pair in turns for both in zip(*pair, strict=True) for line in both), template=thinks)
    assert (made.answers, len(made.rows), made.rewritten) == (60, 60, 40)
    assert len({row.group for row in made.rows}) == 20
    _, held = hold_out(made.rows, 0.1, seed=0)
    assert len(held) == 6, "two conversations of three answers"


def test_half_characters_of_a_conversation_become_the_replacement_character(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    call = {"function": {"name": "look", "arguments": '{"q": "\\ud83d"}'}}
    line = {"messages": [said("user", "a\ud83d"), {**said("assistant", "😀"), "tool_calls": [call]}]}
    file.write_text(json.dumps(line) + "\n")
    ((example,), _) = read_examples([file])
    asked, answered = example.messages
    assert (asked["content"], answered["content"]) == ("a\ufffd", "😀")
    assert answered["tool_calls"][0]["function"]["arguments"] == {"q": "\ufffd"}


TOOL = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}
ACTS: list[Message] = [
    said("user", "where?"),
    {**said("assistant", ""), "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {}}}]},
    said("tool", "there"),
    said("assistant", "there"),
]
RENDERS_CALLS = CHATML.replace(
    "(message['content'] or '')", "(message['content'] or '') + (message.tool_calls | string)"
)
RENDERS_TOOLS = "{{ tools | string }}" + RENDERS_CALLS


@pytest.mark.parametrize(
    ("template", "losses"),
    [
        (
            CHATML,
            [
                "all 2 answers that call tools are dropped (not_rendered 2)",
                "the chat template leaves out the tools: 2 of 2 requests offer some, their prompts have none",
            ],
        ),
        (
            RENDERS_CALLS,
            ["the chat template leaves out the tools: 2 of 4 requests offer some, their prompts have none"],
        ),
        (RENDERS_TOOLS, []),
    ],
)
def test_a_template_that_loses_the_tools_or_every_call_of_one_is_named(
    rows_of: Any, template: str, losses: list[str]
) -> None:
    made = rows_of(*[{"messages": ACTS, "tools": [TOOL]}] * 2, template=template)
    assert made.systematic_losses() == losses


def test_a_kind_of_answers_of_which_some_are_trained_is_not_lost(rows_of: Any) -> None:
    bad = {**ACTS[1], "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": "no object"}}]}
    lines = [{"messages": [ACTS[0], call, *ACTS[2:]], "tools": [TOOL]} for call in (ACTS[1], bad)]
    made = rows_of(*lines, template=RENDERS_TOOLS)
    assert dict(made.dropped) == {"bad_arguments": 1}
    assert made.systematic_losses() == []

"""Chat templates that keep history, and the doctor's findings on those that do not."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.models.tiny_model import CHATML
from tests.support.places import ROOT
from trainspan_cli.doctor.chat_template import (
    keeps_later_system_messages,
    left_out,
    merge_ratios,
    model_template,
    prefix_keeping_template,
    probe_history,
    renderer,
)
from trainspan_cli.doctor.examine import template_findings

DROPS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPENS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<think>\n{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
REFUSES_TOOLS = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}|{% endfor %}"


def _trl_template(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return (Path(next(iter(spec.submodule_search_locations))) / "chat_templates" / f"{name}.jinja").read_text()


def _model(folder: Path, template: str) -> Path:
    config = {"chat_template": template, "eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("template", "ratios"),
    [
        (CHATML, {"further questions": 1.0, "tool results": 1.0}),
        (DROPS_THOUGHTS, {"further questions": 0.0, "tool results": 0.0}),
        (OPENS_THOUGHTS, {"further questions": 1.0, "tool results": 1.0}),
        (REFUSES_TOOLS, {"further questions": 1.0}),
        ("{% for m in messages %}x{% endfor %}", {}),
    ],
)
def test_the_merge_ratio_tells_what_a_template_does_to_history(template: str, ratios: dict[str, float]) -> None:
    assert merge_ratios(template, {}) == ratios


def test_a_template_may_keep_thoughts_within_a_tool_loop_only() -> None:
    render = renderer(_trl_template("qwen3"), {})
    questions, tools = (probe_history(render, role, thoughts=True) for role in ("user", "tool"))
    assert questions is not None
    assert tools is not None
    assert (questions.kept, questions.of, tools.kept) == (0, 3, 3)


def test_the_template_is_found_in_either_place(tmp_path: Path) -> None:
    assert model_template(tmp_path) is None
    _model(tmp_path, "one")
    marks = {"bos_token": "", "eos_token": "<|im_end|>", "unk_token": "", "pad_token": ""}
    assert model_template(tmp_path) == ("one", marks)
    (tmp_path / "chat_template.jinja").write_text("two")
    assert model_template(tmp_path) == ("two", marks)


def test_the_doctor_names_a_template_that_deletes_thoughts_and_one_that_does_not(tmp_path: Path) -> None:
    (finding,) = template_findings(str(_model(tmp_path, _trl_template("qwen3"))))
    assert (finding.level, finding.subject) == ("note", "chat template")
    assert "merge ratio 0.00 over further questions, 1.00 over tool results" in finding.detail
    assert "merge ratio 1.00 over further questions, 1.00 over tool results" in finding.advice
    keeper = prefix_keeping_template(_trl_template("qwen3"))
    assert f"trainspan serve {tmp_path} -- --chat-template {keeper}" in finding.advice


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        (CHATML, ["tool definitions", "tool calls"]),
        (_trl_template("qwen3"), []),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}", ["tool calls"]),
        ("{{ raise_exception('nothing') }}", []),
    ],
)
def test_a_template_without_a_place_for_tools_is_known(template: str, missing: list[str]) -> None:
    assert left_out(template, {}) == missing


def test_the_doctor_says_that_a_template_leaves_tools_out(tmp_path: Path) -> None:
    (tools,) = template_findings(str(_model(tmp_path, CHATML)))  # and it does not praise the merge ratio
    assert tools.detail.startswith(f"of {tmp_path} leaves out tool definitions and tool calls")
    assert "--chat-template" in tools.advice
    served = ROOT / "examples" / "templates" / "chatml-tools.jinja"
    (history,) = template_findings(str(tmp_path), str(served))
    assert history.level == "ok", "the server was started with a template that has them"


def test_the_doctor_says_what_to_do_if_no_better_template_is_known(tmp_path: Path) -> None:
    _, finding = template_findings(str(_model(tmp_path, DROPS_THOUGHTS)))
    assert finding.level == "note"
    assert "leaves earlier answers as they are" in finding.advice


def test_the_doctor_is_content_with_a_template_that_keeps_history(tmp_path: Path) -> None:
    with_tools = "{{ tools }}" + CHATML.replace(
        "(message['content'] or '')", "message.content + message.tool_calls | string"
    )
    (finding,) = template_findings(str(_model(tmp_path, with_tools)))
    assert (finding.level, finding.advice) == ("ok", "")
    assert template_findings(None) == []
    assert template_findings("org/model-that-is-not-here") == []


@pytest.mark.parametrize("name", ["qwen3_5_think_training", "qwen3_8_training"])
def test_a_model_that_takes_a_system_message_only_first_gets_a_template_that_keeps_later_ones(
    name: str, tmp_path: Path
) -> None:
    """The rest of its template stays: further questions and tool results merge as before."""
    own = _trl_template(name)
    (*_, finding) = template_findings(str(_model(tmp_path, own)))
    assert "takes a system message only at the beginning" in finding.detail
    assert "examples/templates/later-system-messages.jinja" in finding.advice
    chained = (ROOT / "examples/templates/later-system-messages.jinja").read_text() + own
    assert not keeps_later_system_messages(own, {})
    assert keeps_later_system_messages(chained, {})
    assert merge_ratios(chained, {}) == merge_ratios(own, {})
    messages = [
        {"role": role, "content": f"{role} {turn}"} for turn, role in enumerate(("system", "user", "assistant"))
    ]
    before = renderer(chained, {})(messages[:2])
    after = renderer(chained, {})(
        [*messages, {"role": "system", "content": "a reminder"}, {"role": "user", "content": "more"}]
    )
    assert after.startswith(before.removesuffix("<think>\n"))
    assert "<|im_start|>user\na reminder<|im_end|>" in after


@pytest.mark.parametrize(("takes_turns", "advice"), [(True, "must take turns"), (False, "later-system-messages.jinja")])
def test_doctor_advises_a_template_for_later_system_messages_only_where_it_helps(
    takes_turns: bool, advice: str, tmp_path: Path
) -> None:
    """Mistral's templates demand that user and assistant take turns."""
    once = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
    turns = "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('turns') }}{% endif %}"
    body = "[{{ m.role }}]{{ m.content }}"
    template = "{% for m in messages %}" + once + (turns if takes_turns else "") + body + "{% endfor %}"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    found = [finding for finding in template_findings(str(tmp_path)) if "only at the beginning" in finding.detail]
    assert len(found) == 1
    assert advice in (found[0].advice or "")


def test_vllm_leaves_later_system_messages_where_they_are_under_these_templates() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    merges = AnthropicServingMessages._detect_merge_inline_system
    later = (ROOT / "examples/templates/later-system-messages.jinja").read_text()
    assert merges(_trl_template("qwen3_8"))
    assert not merges(later + _trl_template("qwen3_8"))
    assert not merges((ROOT / "examples/templates/chatml-tools.jinja").read_text())

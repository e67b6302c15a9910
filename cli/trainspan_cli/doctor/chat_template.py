"""Detection of chat templates that leave tools out, or that rewrite history (such as deleting `<think>` of earlier answers) and so
prevent merging.

A call merges into the previous one if its prompt begins with that call's prompt and answer. This is tested on
conversations in which the agent sends the model's answers back unchanged.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.files.durable import JsonObject

__all__ = [
    "HistoryProbe",
    "keeps_later_system_messages",
    "left_out",
    "merge_ratios",
    "model_template",
    "prefix_keeping_template",
    "probe_history",
    "renderer",
]

Message = JsonObject
Render = Callable[[list[Message]], str]
"""Messages → the prompt for the next answer. Raises if the template refuses them."""

_TURNS: Final = 4
_TOOL: Final[JsonObject] = {
    "name": "probe_the_tools",
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}
_ASKS: Final[list[Message]] = [{"role": "user", "content": "question"}]
_CALLS: Final[list[Message]] = [
    *_ASKS,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "0", "type": "function", "function": {"name": _TOOL["name"], "arguments": {}}}],
    },
    {"role": "tool", "tool_call_id": "0", "content": "result"},
]


@dataclass(frozen=True, slots=True)
class HistoryProbe:
    """Of `of` calls with a predecessor, `kept` begin with it."""

    kept: int
    of: int

    @property
    def merge_ratio(self) -> float:
        return self.kept / self.of


def probe_history(render: Render, follow_up: str, *, thoughts: bool) -> HistoryProbe | None:
    """Probes a conversation of four calls, each followed by a message of role `follow_up` (user or tool).

    `thoughts`: every answer begins with one. None if the template does not accept such a message or render plain text.
    """
    messages: list[Message] = [{"role": "user", "content": "question 0"}]
    before, n_preserved = "", 0
    for turn in range(_TURNS):
        try:
            prompt = render(messages)
        except Exception:  # noqa: BLE001 - templates raise anything
            return None
        if turn and f"answer {turn - 1}" not in prompt:
            return None
        n_preserved += bool(before) and prompt.startswith(before)
        answer = f"{_thought(turn, prompt) if thoughts else ''}answer {turn}"
        before = prompt + answer
        messages = [*messages, {"role": "assistant", "content": answer}, {"role": follow_up, "content": f"more {turn}"}]
    return HistoryProbe(n_preserved, _TURNS - 1)


def _thought(turn: int, prompt: str) -> str:
    """The thought of an answer: its continuation if the prompt opens it, nothing if the prompt closes it."""
    if prompt.rstrip().endswith("</think>"):
        return ""
    whole = f"<think>\nthought {turn}\n</think>\n\n"
    return next((whole.removeprefix(mark) for mark in ("<think>\n", "<think>") if prompt.endswith(mark)), whole)


def model_template(model: Path, file: Path | None = None) -> tuple[str, JsonObject] | None:
    """The chat template of a model directory, or the one in `file`, and the special tokens that it may use; None without one."""
    try:
        config: JsonObject = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    template_file = file or model / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
    if isinstance(template, list):
        template = next((item.get("template") for item in template if item.get("name") == "default"), None)
    if not isinstance(template, str):
        return None
    marks = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    texts = {name: mark.get("content") if isinstance(mark, Mapping) else mark for name, mark in marks.items()}
    return template, {name: text or "" for name, text in texts.items()}


def renderer(template: str, special_tokens: Mapping[str, Any]) -> Render:
    """Renders with transformers' own environment, as vLLM does. Raises ModuleNotFoundError without transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: list[Message]) -> str:
        answer: Any = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True, **special_tokens
        )
        return str(answer[0][0])

    return render


def left_out(template: str, special_tokens: Mapping[str, Any]) -> list[str]:
    """What of an agent's tools is not in its prompts: "tool definitions", "tool calls". Empty too if it cannot be rendered.

    Raises ModuleNotFoundError without transformers.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    offered: list[Any] = [{"type": "function", "function": _TOOL}]
    missing = []
    for what, messages, tools in (("tool definitions", _ASKS, offered), ("tool calls", _CALLS, None)):
        try:
            rendered: Any = render_jinja_template([messages], tools=tools, chat_template=template, **special_tokens)
        except Exception:  # noqa: BLE001 - templates raise anything
            continue
        if str(_TOOL["name"]) not in str(rendered[0][0]):
            missing.append(what)
    return missing


def keeps_later_system_messages(template: str, special_tokens: Mapping[str, Any]) -> bool:
    """Whether a system message after others stays where it is. Raises ModuleNotFoundError without transformers."""
    said = (("system", "first rule"), ("user", "question"), ("system", "later rule"), ("user", "more"))
    try:
        prompt = renderer(template, special_tokens)([{"role": role, "content": text} for role, text in said])
    except Exception:  # noqa: BLE001 - templates raise anything
        return False
    places = [prompt.find(text) for _, text in said]
    return places[0] >= 0 and places == sorted(places)


def prefix_keeping_template(template: str) -> Path | None:
    """The path of TRL's prefix-keeping variant of a known template; None if TRL is missing or has none."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "chat_templates"
    for known in sorted(folder.glob("*.jinja")):
        counterpart = known.with_name(f"{known.stem}_training.jinja")
        if counterpart.is_file() and known.read_text(encoding="utf-8").strip() == template.strip():
            return counterpart
    return None


def merge_ratios(template: str, special_tokens: Mapping[str, Any]) -> dict[str, float]:
    """Share of calls that merge, after further questions and after tool results, if the template accepts them.

    Answers have thoughts if the template handles them. Raises ModuleNotFoundError without transformers.
    """
    render, thoughts = renderer(template, special_tokens), "think" in template
    probes = {
        name: probe_history(render, role, thoughts=thoughts)
        for name, role in (("further questions", "user"), ("tool results", "tool"))
    }
    return {name: probe.merge_ratio for name, probe in probes.items() if probe is not None}

"""The harnesses that are run, and how the scripted policy does the task with each, in each cell of the matrix."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.models.scripted_model import tool_call

__all__ = ["ALL", "CASES", "OVERFLOWS", "PACKAGES", "TITLES", "Case", "hanging", "plain", "resumed", "waiting"]

Rule = tuple[str, str]
"""Pattern in the prompt → answer; the first that matches counts."""

READ = "cat notes.txt"
WRITE = "echo 6174 > answer.txt; echo written-down"
HANG = "command sleep 987"
"""Qwen Code refuses commands that begin with `sleep`."""
DONE = ("written-down", "The answer is 6174.")
EDIT = "answer.txt\n```\n6174\n```"
"""Aider's way to write the answer."""
PACKAGES = {
    "claude-code": "@anthropic-ai/claude-code@2.1.197",
    "codex": "@openai/codex@0.171.0",
    "opencode": "opencode-ai@1.18.33",
    "pi": "@mariozechner/pi-coding-agent@0.73.1",
    "mini-swe-agent": "mini-swe-agent==2.4.6",
    "aider": "aider-chat==0.86.2",
    "hermes": "hermes-agent[mcp]==0.19.0",
    "qwen-code": "@qwen-code/qwen-code@0.15.10",
}
"""What npm installs, or pip if it has `==`."""
TITLES = {
    "claude-code": "Claude Code",
    "codex": "Codex",
    "opencode": "OpenCode",
    "pi": "Pi",
    "hermes": "Hermes",
    "qwen-code": "Qwen Code",
}
"""Names in the table, where they are not those of the connections."""


@dataclass(frozen=True, slots=True)
class Case:
    """One harness in one cell of the matrix."""

    harness: str
    """Name of the built-in connection."""
    cell: str
    script: tuple[Rule, ...]
    kinds: tuple[str, ...] = ("main", "main", "main")
    """Of its calls, in order, without the title of the conversation, which may be asked for at any time."""
    tools: tuple[tuple[str, int], ...] = ()
    """Name of each tool step, and the number of the call that asked for it."""
    segments: int = 1
    settings: tuple[tuple[str, str], ...] = ()
    """Texts of the connection that the case replaces."""
    is_concurrent: bool = False
    """Whether a sub-agent's calls mix with its parent's, so that only their numbers are known."""
    thinks: bool = False
    """Whether it runs on the server with a short context and a reasoning parser, where each answer begins with thoughts."""
    status: str = "ok"

    @property
    def titles(self) -> int:
        """How many titles it asks for."""
        return int(self.harness == "opencode")

    @property
    def name(self) -> str:
        return f"{self.harness}-{self.cell}".replace(" ", "-")


_SHELLS: dict[str, tuple[str, str, dict[str, object]]] = {
    "claude-code": ("Bash", "command", {"description": "Does it"}),
    "codex": ("exec_command", "cmd", {}),
    "opencode": ("bash", "command", {"description": "Does it"}),
    "pi": ("bash", "command", {}),
    "mini-swe-agent": ("bash", "command", {}),
    "hermes": ("terminal", "command", {}),
    "qwen-code": ("run_shell_command", "command", {"is_background": False}),
}
"""Name, argument and further arguments of each harness's tool for commands."""
_TITLE = ("title generator", "Reading notes")


def _shell(harness: str, command: str) -> str:
    tool, argument, more = _SHELLS[harness]
    return tool_call(tool, **{argument: command, **more})


def _steps(harness: str, *calls: int) -> tuple[tuple[str, int], ...]:
    """Tool steps by the numbers of their calls."""
    return tuple((_SHELLS[harness][0], call) for call in calls)


def _done(harness: str) -> tuple[Rule, ...]:
    """The title of OpenCode's conversations, and how a run ends once the answer is written."""
    last = _shell(harness, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") if harness == "mini-swe-agent" else DONE[1]
    return (*([_TITLE] if harness == "opencode" else []), (DONE[0], last))


def plain(harness: str, cell: str = "plain", *, thinks: bool = False) -> Case:
    """Reads the notes, writes the answer, says so; aider, which has no tools, only writes it."""
    if harness == "aider":
        return Case(harness, cell, (("", EDIT),), ("main",), thinks=thinks)
    script = (*_done(harness), ("6174", _shell(harness, WRITE)), ("", _shell(harness, READ)))
    segments = 3 if thinks and harness == "hermes" else 1  # it sends no thoughts back
    return Case(harness, cell, script, ("main", "main", "main"), _steps(harness, 0, 1), segments, thinks=thinks)


def _parallel(harness: str) -> Case:
    """Reads the notes and does something else in one answer with two tool calls."""
    both = f"{_shell(harness, READ)}\n{_shell(harness, 'echo second-result')}"
    script = (*_done(harness), ("second-result", _shell(harness, WRITE)), ("", both))
    return Case(harness, "parallel tools", script, ("main", "main", "main"), _steps(harness, 0, 0, 1))


def hanging(harness: str) -> Case:
    """Reads the notes, then waits for longer than a rollout may take."""
    if harness == "aider":
        return _tested("hanging tool", HANG, ("main",))
    script = (*_done(harness), ("6174", _shell(harness, HANG)), ("", _shell(harness, READ)))
    return Case(harness, "hanging tool", script, ("main", "main"))


def resumed(harness: str) -> Case:
    """The task of `hanging`, with nothing that hangs."""
    return _tested("plain", "true", ("main",)) if harness == "aider" else plain(harness)


def waiting(harness: str, folder: Path) -> Case:
    """Reads the notes with a command that ends only when the test says so."""
    wait = f"touch {folder}/reached; until [ -e {folder}/go ]; do sleep 0.1; done"
    if harness == "aider":
        return _tested("hot swap", f"{wait}; exit 1", ("main", "main"))
    script = (*_done(harness), ("6174", _shell(harness, WRITE)), ("", _shell(harness, f"{wait}; {READ}")))
    return Case(harness, "hot swap", script, settings=_PATIENCE.get(harness, ()))


_PATIENCE = {
    "mini-swe-agent": (('"--yolo",', '"--yolo", "--config", "mini.yaml", "--config", "environment.timeout=200",'),)
}
"""Texts of the connections that let a command run for longer than the swap may take."""


def _tested(cell: str, command: str, kinds: tuple[str, ...], *, thinks: bool = False) -> Case:
    """Has aider write the answer and run a test of it, whose failure it brings to the model."""
    script = (("And got this output", DONE[1]), ("", EDIT))
    return Case("aider", cell, script, kinds, settings=_testing(command), thinks=thinks)


def _testing(command: str, *options: str) -> tuple[tuple[str, str], ...]:
    """Aider's test of what it wrote, with further options."""
    return (('"--yes-always"', json.dumps(["--yes-always", "--auto-test", "--test-cmd", command, *options])[1:-1]),)


def _aider_compaction() -> Case:
    """Restores a long history, which is summarized first. A summary that aider begins during a task is often thrown away."""
    history = "#### Read notes.txt\n\n" + "It says many things.\n" * 1000
    options = '"--yes-always", "--restore-chat-history", "--max-chat-history-tokens", "2000"'
    settings = (
        ('"--yes-always"', options),
        ("[files]", f'[files]\n"{{workdir}}/.aider.chat.history.md" = {json.dumps(history)}'),
    )
    script = (("summarize this partial conversation", "SUMMED: the number is 6174"), ("SUMMED", EDIT))
    return Case("aider", "compaction", script, ("summary", "main"), segments=2, settings=settings)


def _aider_overflow() -> Case:
    """Brings one long output of tests after the other to the model."""
    settings = (
        *_testing("seq 1 5000; exit 1", "--max-chat-history-tokens", "1000000"),
        ('"max_input_tokens": {max_model_len}', '"max_input_tokens": 400000'),
    )
    return Case("aider", "overflow", (("", EDIT),), (), settings=settings, thinks=True)


def _sub_agent(harness: str) -> Case:
    """Has a sub-agent read the notes."""
    ask, wait = _DELEGATION[harness]
    script = (
        *_done(harness),
        ("It says 6174", _shell(harness, WRITE)),
        *wait,
        (r"SUBTASK[\s\S]*The number is 6174", "It says 6174"),
        ("SUBTASK", _shell(harness, READ)),
        ("", ask),
    )
    if harness == "codex":  # it goes on while its sub-agent works, and waits for it with a call of its own
        beside = ("main", "main", "sub_agent", "sub_agent", "main", "main")
        return Case(harness, "sub-agent", script, beside, segments=2, is_concurrent=True)
    kinds = ("main", "sub_agent", "sub_agent", "main", "main")
    steps = ((_DELEGATES.get(harness, "Agent"), 0), *_steps(harness, 1, 3))
    return Case(harness, "sub-agent", script, kinds, steps, segments=2)


_DELEGATION: dict[str, tuple[str, tuple[Rule, ...]]] = {
    "claude-code": (
        tool_call("Agent", description="Reads", prompt="SUBTASK: read it", subagent_type="general-purpose"),
        (),
    ),
    "codex": (
        tool_call("multi_agent_v1__spawn_agent", message="SUBTASK: read it"),
        ((r'"agent_id": ?"([^"]+)"', tool_call("multi_agent_v1__wait_agent", targets=["$1"], timeout_ms=60000)),),
    ),
    "opencode": (tool_call("task", description="Reads", prompt="SUBTASK: read it", subagent_type="general"), ()),
    "qwen-code": (
        tool_call("agent", description="Reads", prompt="SUBTASK: read it", subagent_type="general-purpose"),
        (),
    ),
    "hermes": (tool_call("delegate_task", goal="SUBTASK: read it"), ()),
}
"""The call that delegates, and rules for what the parent does meanwhile."""
_DELEGATES = {"opencode": "task", "qwen-code": "agent", "hermes": "delegate_task"}


def _compaction(harness: str) -> Case:
    """Reads until the history is summarized; the rest of the task then comes from the summary."""
    asks, lines, kinds, segments = _COMPACTION[harness]
    script = (
        *_done(harness),
        (asks, "<summary>SUMMED: the number is 6174</summary>"),
        ("SUMMED", _shell(harness, WRITE)),
        *([("6174", _AFTERWARDS[harness])] if harness in _AFTERWARDS else []),
        ("", _shell(harness, f"{READ}; seq 1 {lines}")),
    )
    return Case(harness, "compaction", script, kinds, segments=segments, settings=_WINDOWS[harness])


_COMPACTION: dict[str, tuple[str, int, tuple[str, ...], int]] = {
    "claude-code": (
        "create a detailed summary of the conversation",
        5500,
        ("main", "main", "main", "summary", "main", "main"),
        3,
    ),
    "codex": ("CONTEXT CHECKPOINT COMPACTION", 2000, ("main", "main", "summary", "main", "main"), 3),
    "opencode": ("context summarization agent", 1500, ("main", "main", "main", "summary", "main", "main"), 3),
    "pi": (
        "context summarization assistant",
        1500,
        ("main", "main", "summary", "summary", "main", "main"),  # before the next prompt it asks for the same again
        4,
    ),
    "hermes": (
        "summarization agent creating a context checkpoint",
        5500,
        ("main", "main", "main", "summary", "main", "main"),
        3,
    ),
    "qwen-code": (
        "summarizes internal chat history",
        5000,
        ("main", "main", "main", "main", "summary", "main", "main"),
        3,
    ),
}
"""What the harness asks for, lines that each reading gives, kinds of the calls, and segments."""
_AFTERWARDS = {
    "pi": "I have read it.",  # it compacts only after its turn
    "qwen-code": _shell("qwen-code", READ),  # it keeps the last two results as they are
}
"""What follows the first reading, where that is not the same again."""
_QWEN_WHOLE_OUTPUTS = (
    '"$version": 4,',
    '"$version": 4, "tools": { "truncateToolOutputLines": 6000, "truncateToolOutputThreshold": 100000 },',
)
_WINDOWS = {
    "claude-code": (
        ('AUTO_COMPACT_WINDOW = "{max_model_len}"', 'AUTO_COMPACT_WINDOW = "60000"'),
        ('MAX_OUTPUT_TOKENS = "{max_output_tokens}"', 'MAX_OUTPUT_TOKENS = "2000"'),
    ),
    "codex": (
        (
            "model_context_window = {max_model_len}",
            "model_context_window = {max_model_len}\nmodel_auto_compact_token_limit = 18000",
        ),
    ),
    "opencode": (
        ('"context": {max_model_len}, "output": {max_output_tokens}', '"context": 24000, "output": 2000'),
        ('"autoupdate": false,', '"autoupdate": false, "compaction": {"preserve_recent_tokens": 100},'),
    ),
    "pi": (
        (
            '"contextWindow": {max_model_len}, "maxTokens": {max_output_tokens}',
            '"contextWindow": 9000, "maxTokens": 2000',
        ),
        (
            "[files]",
            '[files]\n"{home}/.pi/agent/settings.json" = \'{"compaction": {"reserveTokens": 2000, "keepRecentTokens": 1}}\'',
        ),
        ('prompt = [" {input}"]', 'prompt = [" {input}", "Go on."]'),
    ),
    "hermes": (
        (
            "context_length: {max_model_len}",
            "context_length: 64000\ncompression: { target_ratio: 0.1, protect_first_n: 1, protect_last_n: 3 }",
        ),
    ),
    "qwen-code": (
        ('"contextWindowSize": {max_model_len}', '"contextWindowSize": 40000'),
        _QWEN_WHOLE_OUTPUTS,
    ),
}
"""Texts of the connections that make the window small."""


def _overflow(harness: str) -> Case:
    """Reads on and on, with a harness that believes that the context is longer than it is."""
    status, asks, kinds = _OVERFLOW[harness]
    reading = _shell(harness, f"{READ}; seq 1 2000")
    script = (
        *_done(harness),
        (asks, "<summary>SUMMED: the number is 6174</summary>"),
        ("SUMMED", _shell(harness, WRITE)),
        ("", reading),
    )
    return Case(harness, "overflow", script, kinds, settings=_BELIEFS.get(harness, ()), thinks=True, status=status)


_NEVER = "no summary is asked for"
_OVERFLOW = {
    "claude-code": ("context_overflow", _NEVER, ()),
    "codex": ("context_overflow", _NEVER, ()),
    "opencode": ("context_overflow", "context summarization agent", ("summary",)),
    "pi": ("ok", "context summarization assistant", ("summary",)),
    "mini-swe-agent": ("context_overflow", _NEVER, ()),
    "hermes": ("ok", "summarization agent creating a context checkpoint", ("summary",)),
    "qwen-code": ("ok", "summarizes internal chat history", ("summary",)),
}
"""How it ends, what a summary is asked for with, and the kinds of the calls that are not `main`."""
_BELIEFS = {
    "claude-code": (('AUTO_COMPACT_WINDOW = "{max_model_len}"', 'AUTO_COMPACT_WINDOW = "400000"'),),
    "codex": (("model_context_window = {max_model_len}", "model_context_window = 400000"),),
    "opencode": (('"context": {max_model_len}', '"context": 400000'),),
    "pi": (
        ('"contextWindow": {max_model_len}', '"contextWindow": 400000'),
        ("[files]", '[files]\n"{home}/.pi/agent/settings.json" = \'{"compaction": {"keepRecentTokens": 4000}}\''),
    ),
    "hermes": (("context_length: {max_model_len}", "context_length: 400000"),),
    "qwen-code": (('"contextWindowSize": {max_model_len}', '"contextWindowSize": 400000'), _QWEN_WHOLE_OUTPUTS),
}


def _mcp(harness: str) -> Case:
    """Has the number from an MCP server's tool."""
    tool, *texts = _MCP[harness]
    script = (*_done(harness), ("The desk says", _shell(harness, WRITE)), ("", tool_call(tool, what="the number")))
    return Case(harness, "MCP tool", script, tools=((tool, 0), *_steps(harness, 1)), settings=((texts[0], texts[1]),))


_SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
_STDIO = json.dumps({"desk": {"command": _SERVER[0], "args": _SERVER[1:]}})
_MCP = {
    "claude-code": (
        "mcp__desk__look_up",
        'IS_SANDBOX = "1"',
        f'IS_SANDBOX = "1"\n[files]\n"{{home}}/.claude.json" = \'{{ "mcpServers": {_STDIO} }}\'',
    ),
    "codex": (
        "mcp__desk__look_up",
        "[analytics]",
        f"[mcp_servers.desk]\ncommand = {json.dumps(_SERVER[0])}\nargs = {json.dumps(_SERVER[1:])}\n\n[analytics]",
    ),
    "opencode": (
        "desk_look_up",
        '"autoupdate": false,',
        '"autoupdate": false, "mcp": ' + json.dumps({"desk": {"type": "local", "command": _SERVER}}) + ",",
    ),
    "hermes": ("mcp__desk__look_up", "\nmodel:\n", f"\nmcp_servers: {_STDIO}\nmodel:\n"),
    "qwen-code": ("mcp__desk__look_up", '"$version": 4,', f'"$version": 4, "mcpServers": {_STDIO},'),
}
"""The tool's name, and the text of the connection that the server's declaration replaces."""

_HARNESSES = ("claude-code", "codex", "opencode", "pi", "mini-swe-agent", "hermes", "qwen-code")
ALL = (*_HARNESSES, "aider")
CASES = (
    *(plain(harness) for harness in ALL),
    *(_parallel(harness) for harness in _HARNESSES),
    *(plain(harness, "thinking model", thinks=True) for harness in _HARNESSES),
    *(_sub_agent(harness) for harness in _DELEGATION),
    *(_compaction(harness) for harness in _COMPACTION),
    _aider_compaction(),
    *(_mcp(harness) for harness in _MCP),
    replace(
        _tested("thinking model", "exit 1", ("main", "main"), thinks=True), segments=2
    ),  # its prompts do not continue each other
)
OVERFLOWS = (*(_overflow(harness) for harness in _OVERFLOW), _aider_overflow())

"""The harnesses that are run, and how the scripted policy does the task with each."""

from dataclasses import dataclass

from tests.support.policy_server.scripted import tool_call

__all__ = ["CASES", "Case"]

READ = "cat notes.txt"
WRITE = "echo 6174 > answer.txt; echo written-down"
Rule = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """One harness."""

    name: str
    """Of the built-in connection."""
    package: str
    """What npm installs, or pip if it has `==`."""
    script: tuple[Rule, ...]
    """Pattern in the prompt → answer; the first that is found."""
    kinds: tuple[str, ...] = ("main", "main", "main")
    """Of its calls, in order."""
    tools: tuple[tuple[str, int], ...] = ()
    """Name of each tool step, and the number of the call that asked for it."""
    connection: str = ""
    """Name of the case's connection; default: `name`."""
    settings: tuple[tuple[str, str], ...] = ()
    """Texts of the connection that the case replaces."""


def _with_shell(tool: str, argument: str = "command", **more: str) -> tuple[Rule, ...]:
    """Reads the notes, writes the answer, says so."""
    return (
        ("written-down", "The answer is 6174."),
        ("6174", tool_call(tool, **{argument: WRITE, **more})),
        ("", tool_call(tool, **{argument: READ, **more})),
    )


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CASES = (
    Case(
        "claude-code",
        "@anthropic-ai/claude-code@2.1.197",
        _with_shell("Bash", description="Does it"),
        tools=(("Bash", 0), ("Bash", 1)),
    ),
    Case(
        "claude-code with a sub-agent",
        "@anthropic-ai/claude-code@2.1.197",
        (
            ("written-down", "The answer is 6174."),
            ("It says 6174", tool_call("Bash", command=WRITE, description="Writes")),
            (r"SUBTASK[\s\S]*The number is 6174", "It says 6174"),
            ("SUBTASK", tool_call("Bash", command=READ, description="Reads")),
            ("", tool_call("Agent", description="Reads", prompt="SUBTASK: read it", subagent_type="general-purpose")),
        ),
        ("main", "sub_agent", "sub_agent", "main", "main"),
        tools=(("Agent", 0), ("Bash", 1), ("Bash", 3)),
        connection="claude-code",
    ),
    Case(
        "claude-code with a compaction",
        "@anthropic-ai/claude-code@2.1.197",
        (
            ("written-down", "The answer is 6174."),
            ("SUMMED", tool_call("Bash", command=WRITE, description="Writes")),
            ("create a detailed summary of the conversation", "<summary>SUMMED: the number is 6174</summary>"),
            ("", tool_call("Bash", command="cat notes.txt; seq 1 5500", description="Reads")),
        ),
        ("main", "main", "main", "summary", "main", "main"),
        tools=(("Bash", 0), ("Bash", 1), ("Bash", 2), ("Bash", 4)),
        connection="claude-code",
        settings=(
            ('AUTO_COMPACT_WINDOW = "{max_model_len}"', 'AUTO_COMPACT_WINDOW = "60000"'),
            ('MAX_OUTPUT_TOKENS = "{max_output_tokens}"', 'MAX_OUTPUT_TOKENS = "2000"'),
        ),
    ),
    Case(
        "codex",
        "@openai/codex@0.171.0",
        _with_shell("exec_command", "cmd"),
        tools=(("exec_command", 0), ("exec_command", 1)),
    ),
    Case(
        "opencode",
        "opencode-ai@1.18.33",
        (("title generator", "Reading notes"), *_with_shell("bash", description="Does it")),
        ("title", "main", "main", "main"),
    ),
    Case("pi", "@mariozechner/pi-coding-agent@0.73.1", _with_shell("bash")),
    Case(
        "mini-swe-agent",
        "mini-swe-agent==2.4.6",
        (("written-down", tool_call("bash", command=SUBMIT)), *_with_shell("bash")[1:]),
    ),
    Case("aider", "aider-chat==0.86.2", (("", "answer.txt\n```\n6174\n```"),), ("main",)),
)

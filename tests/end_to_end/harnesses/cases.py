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
    context: int = 131_072


def _with_shell(tool: str, argument: str = "command", **more: str) -> tuple[Rule, ...]:
    """Reads the notes, writes the answer, says so."""
    return (
        ("written-down", "The answer is 6174."),
        ("6174", tool_call(tool, **{argument: WRITE, **more})),
        ("", tool_call(tool, **{argument: READ, **more})),
    )


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CASES = (
    Case("claude-code", "@anthropic-ai/claude-code@2.1.197", _with_shell("Bash", description="Does it")),
    Case("codex", "@openai/codex@0.171.0", _with_shell("exec_command", "cmd")),
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

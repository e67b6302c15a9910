"""What the game agent tells the model: the instruction, and worked examples of single turns."""

from collections.abc import Sequence

SYSTEM = "You play a text game. Answer with one of the commands, the one that leads to the goal."
EXAMPLES: tuple[tuple[str, int, tuple[str, ...], str], ...] = (
    ("take coin, then open chest", 0, ("go east", "open chest", "take coin"), "take coin"),
    ("take coin, then open chest", 1, ("drop coin", "go east", "open chest"), "open chest"),
    ("put mug on shelf, then go north", 0, ("go north", "take mug"), "take mug"),
)
"""(goal, score, commands, answer)."""


def turn(goal: str, score: int, commands: Sequence[str]) -> str:
    """Returns the text of one turn; equal states of a game have equal texts."""
    return f"goal: {goal}\nscore: {score} of {goal.count(', then ') + 1}\ncommands: {', '.join(commands)}"


def messages(goal: str, score: int, commands: Sequence[str]) -> list[dict[str, str]]:
    """Returns the request of one turn."""
    found = [{"role": "system", "content": SYSTEM}]
    for goal_then, score_then, commands_then, answer in EXAMPLES:
        asked = turn(goal_then, score_then, commands_then)
        found += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return [*found, {"role": "user", "content": turn(goal, score, commands)}]

"""What the math agent tells the model: the instruction, and worked examples of (question, expression, answer)."""

SYSTEM = "Call calculate with one expression, then answer with the number."
EXAMPLES = (
    ("how many legs are there in total if you have 3 dogs, 2 ducks?", "3*4+2*2", "16"),
    ("Solve for x: 3*x + 4 = 19", "(19-4)/3", "5"),
    ("State the final answer to the following arithmetic problem: 12 - 5 + 30 =", "12-5+30", "37"),
)

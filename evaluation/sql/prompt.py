"""What the agents of the SQL team tell the model: instructions, and worked examples as chat turns."""

WRITER = "Write one SQL query."
CHECKER = "Say yes if the query answers the question, otherwise no."
REWRITER = "The query is wrong. Write a better one."
SCHEMAS = {
    "orders": "orders(status, city, state, items, price, payment)",
    "products": "products(name, color, material, price, available)",
    "reservations": "reservations(origin, destination, cabin, trip, insurance, bags, passengers)",
}
EXAMPLES = (
    ("orders", "How many orders have state TX?", "SELECT count(*) FROM orders WHERE state = 'TX'", "[(40,)]"),
    ("products", "What is the highest price of products?", "SELECT max(price) FROM products", "[(93.5,)]"),
    (
        "reservations",
        "What is the average bags of reservations with cabin economy?",
        "SELECT avg(bags) FROM reservations WHERE cabin = 'economy'",
        "[(1.25,)]",
    ),
)
WRONG = (
    "orders",
    "How many orders have items 2?",
    "SELECT count(*) FROM products WHERE items = 2",
    "error: no such column: items",
    "SELECT count(*) FROM orders WHERE items = 2",
)
"""A table and question, a wrong query with its result, and the right query."""

Messages = list[tuple[str, str]]
"""(role, content) in order."""


def asked(table: str, question: str) -> str:
    return f"{SCHEMAS[table]}\n{question}"


def written(table: str, question: str) -> Messages:
    """Returns the writer's messages."""
    messages = [("system", WRITER)]
    for example_table, example, query, _ in EXAMPLES:
        messages += [("user", asked(example_table, example)), ("assistant", query)]
    return [*messages, ("user", asked(table, question))]


def checked(table: str, question: str, query: str, result: str) -> Messages:
    """Returns the checker's messages."""
    good = [(*example, "yes") for example in EXAMPLES[:2]]
    bad = (*WRONG[:4], "no")
    messages = [("system", CHECKER)]
    for example_table, example, example_query, example_result, verdict in (good[0], bad, good[1]):
        messages += [
            ("user", f"{asked(example_table, example)}\n{example_query}\n{example_result}"),
            ("assistant", verdict),
        ]
    return [*messages, ("user", f"{asked(table, question)}\n{query}\n{result}")]


def rewritten(table: str, question: str, query: str, result: str) -> Messages:
    """Returns the rewriter's messages."""
    example_table, example, wrong, example_result, right = WRONG
    return [
        ("system", REWRITER),
        ("user", f"{asked(example_table, example)}\n{wrong}\n{example_result}"),
        ("assistant", right),
        ("user", f"{asked(table, question)}\n{query}\n{result}"),
    ]

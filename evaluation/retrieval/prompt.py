"""What the retrieval agent tells the model: the instruction, and worked examples."""

SYSTEM = "Call search with a few words, then answer with the value only."
EXAMPLES = (
    (
        "EcoLoan: Late fee?",
        "EcoLoan late fee",
        "EcoLoan: Fees\nLate fee: $12.00\nLate fees are waived once.\nEcoLoan: Eligibility\nMinimum age: 21",
        "$12.00",
    ),
    (
        "Monthly withdrawal limit of Student Saver?",
        "Student Saver monthly withdrawal limit",
        "Student Saver: Withdrawals\nMonthly withdrawal limit: 4\nStudent Saver: FAQ\nIs it free? Yes",
        "4",
    ),
)
"""(question, query, the tool's result, answer); the products are invented and in no document."""

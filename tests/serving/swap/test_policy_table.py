"""Which of several policies answers a request."""

from pathlib import Path

from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.swap.policy_table import PolicyTable


def test_the_policy_of_a_kind_comes_before_that_of_the_agent_and_the_named_model_before_both() -> None:
    base, writer, condenser = (ServedPolicy(name, 0, Path("/none")) for name in ("policy", "writer", "condenser"))
    named = {"writer": writer, "condenser": condenser}
    table = PolicyTable(base, named, {"author": "writer", "kind:summary": "condenser"})
    assert table.choose(None, "author") is writer
    assert table.choose("policy", "author", "summary") is condenser
    assert table.choose("writer", None, "summary") is writer
    assert table.choose(None, "author", "title") is writer
    assert table.choose(None, None, "title") is base

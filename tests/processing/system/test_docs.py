"""The functions in docs/processing.md work as shown."""

import re
from pathlib import Path

import polars as pl
import pytest

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import chain
from tests.support.places import ROOT
from trainspan_processing.reasons.drop_reasons import rollout_reason

_PAGE = ROOT / "docs" / "processing.md"


def test_a_users_own_reward_credit_and_baseline_of_the_page(bench: Bench, tmp_path: Path) -> None:
    reward, of_calls, credit, baseline = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    files = {}
    shown = {"short_answers": reward, "short_steps": of_calls, "last_call_only": credit, "median": baseline}
    for name, code in shown.items():
        files[name] = tmp_path / f"of_docs_{name}.py"
        files[name].write_text(code)
        assert code.count("\n") <= 12
    for name, width in (("a", 2), ("b", 4), ("c", 9)):
        bench.send(chain(bench.rollout(name), 2, width=width))
    built = bench.build(
        round_=0,
        reward=f"{files['short_answers']}:short_answers",
        credit=f"{files['last_call_only']}:last_call_only",
        baseline=f"{files['median']}:median",
    )
    # rewards −2, −4, −9, only on the last call; their median is −4
    assert rows(built)["advantage"].to_list() == [4.0, 2.0, 4.0, 0.0, 4.0, -5.0]
    of_each = bench.build(
        round_=0,
        out=bench.out / "of-each",
        reward=f"{files['short_steps']}:short_steps",
        reward_name="reward=1,short=1",
        credit="return_to_go",
        baseline="none",
    )
    # 1 for the rollout, and −.01 for each token of the call and of those after it
    assert rows(of_each)["return"].to_list() == pytest.approx([0.96, 0.98, 0.92, 0.96, 0.82, 0.91])


def test_the_table_of_reasons_has_those_of_rollouts_in_the_order_in_which_they_apply() -> None:
    faults = {  # column → its value with and without the fault
        "selected": (False, True),
        "split": ("val", "train"),
        **dict.fromkeys(("superseded", "collides", "conflicts"), (True, False)),
        "complete": (False, True),
        "teaches": (False, True),
        **dict.fromkeys(("reward_failed", "reward_unclear", "reward_outside"), (True, False)),
        **dict.fromkeys(("reward_untrusted", "reward_invalid"), (True, False)),
    }
    rollouts = pl.DataFrame(  # the first has every fault, each of the others one less
        [[faults[name][place < count] for place, name in enumerate(faults)] for count in range(len(faults) + 1)],
        schema=list(faults),
        orient="row",
    ).with_columns(status=pl.lit("agent_error"), reward=pl.lit(None, dtype=pl.Float64))
    reasons = rollouts.select(rollout_reason()).to_series().to_list()
    assert (len(set(reasons)), reasons[-1]) == (13, "no_reward")
    table = _PAGE.read_text().partition("first in this order")[2].partition("\n### ")[0]
    listed = [name for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for name in re.findall("`(.*?)`", row)]
    assert [name for name in listed if name in reasons] == reasons

"""The functions in docs/processing.md work as shown."""

import re
from pathlib import Path

from tests.processing.conftest import Bench, rows
from tests.processing.support.traces import chain
from tests.support.places import ROOT

_PAGE = ROOT / "docs" / "processing.md"


def test_a_users_own_reward_credit_and_baseline_of_the_page(bench: Bench, tmp_path: Path) -> None:
    reward, credit, baseline = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    files = {}
    for name, code in {"short_answers": reward, "last_call_only": credit, "median": baseline}.items():
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

"""`make bench-guard` finds a slowdown of 15 % in each part, and none where there is none."""

import shutil
from pathlib import Path

import pytest

from benchmarks.guard.__main__ import PACKAGES, compare, is_slower, ratio
from tests.support.places import ROOT

PLANTED = """

def _slower(function, clock=__import__("time").process_time, ended=[None]):
    def wrapped(*given, **named):
        result = function(*given, **named)
        if ended[0] is not None:
            until = clock() + 0.15 * (clock() - ended[0])
            while clock() < until:
                pass
        ended[0] = clock()
        return result

    return wrapped


"""
"""Each call of the function takes 15 % of the CPU time that its process used since the last one."""
PLACES = {
    "exporters": [("exporters/trainspan/_calls/policy_request.py", "prepare")],
    "collector": [
        ("collector/trainspan_collector/rows/batch.py", "Batch.add"),
        ("collector/trainspan_collector/store/insert.py", "load"),
    ],
    "processing": [("processing/trainspan_processing/dataset/parquet.py", "write_part")],
    "serving": [("serving/trainspan_serving/export/call_span.py", "encode_request")],
    "training": [("training/trainspan_training/data/sequences.py", "make_sequences")],
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PLACES)
def test_a_planted_slowdown_of_15_percent_is_found(tmp_path: Path, part: str) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    for path, function in PLACES[part]:
        with (tmp_path / path).open("a") as file:
            file.write(f"{PLANTED}{function} = _slower({function})\n")
    pairs = compare(part, ROOT, tmp_path)
    assert is_slower(pairs), ratio(pairs)


@pytest.mark.slow
def test_equal_trees_are_not_told_apart() -> None:
    pairs = compare("serving", ROOT, ROOT)
    assert not is_slower(pairs), ratio(pairs)

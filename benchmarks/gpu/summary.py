"""One page of the results in $OUT, printed and written to $OUT/summary.txt: steps, goals, cases."""

import json
from collections.abc import Iterable, Mapping
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.figures import OUT, note, read

__all__ = ["goals", "main", "verdict"]

Goal = tuple[str, float | None, float, bool]
"""What is measured, its value (None: not measured), the goal, and whether more is better."""


def main() -> None:
    note_steps()
    whole = read()
    lines = [f"commit {whole.get('commit')}, {whole.get('machine')}"]
    lines += [f"step {name}: {step}" for name, step in whole.get("steps", {}).items()]
    lines += [verdict(*goal) for goal in goals(whole)]
    for name in ("matmul_bf16", "matmul_float32", "copy", "upload"):
        lines.append(f"{name}: {whole.get('facts', {}).get(name)}")
    for name, case in whole.get("exact", {}).items():
        lines.append(f"exact {name}: {json.dumps(case)[:200]}")
    lines.append(
        "case | step s | forwarded/s | trained/s | TFLOP/s | share of matmul | peak / reserved / estimate GiB | first s"
    )
    for name, case in [*whole.get("bench", {}).items(), *whole.get("stock", {}).items()]:
        lines += _case(name, case)
    for section in ("rounds", "policy"):
        lines += [f"{section} {name}: {json.dumps(case)[:300]}" for name, case in whole.get(section, {}).items()]
    text = "\n".join(lines)
    print(text)
    (OUT / "summary.txt").write_text(text + "\n")


def goals(whole: Mapping[str, Any]) -> list[Goal]:
    """The goals for one H100, with what was measured."""
    bench, stock, policy = (_cases(whole, section) for section in ("bench", "stock", "policy"))
    theirs = max(
        _figures((case for name, case in stock.items() if name.startswith("stock_")), "trained_per_s"), default=None
    )
    ours = stock.get("trainspan_0.5B_agent", {}).get("trained_per_s")
    demo, large = policy.get("demo", {}), policy.get("large", {})
    stages = [one["seconds"] for one in large.get("rounds", []) if one.get("seconds")]
    success = list(demo.get("success", {}).values())
    exact = [case["within"] for case in _cases(whole, "exact").values() if "within" in case]
    return [
        ("share of GPU tests that pass", _passed(), 1.0, True),
        ("share of layouts with the exact gradient", sum(exact) / len(exact) if exact else None, 1.0, True),
        (
            "trainer's share of the bf16 matmul rate, 1.5B packed",
            bench.get("1.5B_long_packed", {}).get("share_of_matmul"),
            0.40,
            True,
        ),
        ("trained tokens/s over stock TRL's, six turns", ours / theirs if ours and theirs else None, 6.0, True),
        (
            "peak memory over the estimate",
            max(_figures(bench.values(), "peak_over_estimate"), default=None),
            1.0,
            False,
        ),
        (
            "reserved memory over the estimate",
            max(_figures(bench.values(), "reserved_over_estimate"), default=None),
            1.0,
            False,
        ),
        (
            "server-trainer mean |Δ logp|, SmolLM2",
            max(_figures(demo.get("rounds", []), "logp_diff_mean"), default=None),
            0.1,
            False,
        ),
        ("save and swap of 1.5B, s", max((one["save"] + one["swap"] for one in stages), default=None), 2.0, False),
        ("held-out success of the demo", success[-1] if len(success) > 1 else None, 0.7, True),
        ("seconds of the demo", demo.get("seconds"), 300.0, False),
    ]


def _passed() -> float | None:
    """Of all tests, the skipped ones included."""
    file = OUT / "gpu-tests.xml"
    if not file.exists():
        return None
    suite = ElementTree.parse(file).getroot().find("testsuite")
    if suite is None:
        return None
    tests, *rest = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    return (tests - sum(rest)) / tests


def note_steps() -> None:
    """Copies code and seconds of each step; 124: it exceeded its limit."""
    steps = OUT / "steps.tsv"
    for line in steps.read_text().splitlines() if steps.exists() else ():
        name, code, seconds = line.split("\t")
        note("steps", name, {"code": code, "seconds": int(seconds)})


def _cases(whole: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {
        name: case for name, case in whole.get(section, {}).items() if isinstance(case, dict) and "error" not in case
    }


def _figures(cases: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [float(case[name]) for case in cases if case.get(name) is not None]


def verdict(what: str, value: float | None, goal: float, more: bool) -> str:
    wanted = f"{'at least' if more else 'at most'} {goal:g}"
    if value is None:
        return f"goal {what}: not measured ({wanted})"
    reached = value >= goal if more else value <= goal
    return f"goal {what}: {value:.4g}, {'reached' if reached else 'MISSED'} ({wanted})"


def _case(name: str, case: Any) -> list[str]:
    if not isinstance(case, dict):
        return []
    if "error" in case or "skipped" in case:
        return [f"{name} | {json.dumps(case)[:200]}"]
    memory = " / ".join(str(case.get(part)) for part in ("peak_allocated_gib", "peak_reserved_gib", "estimate_gib"))
    row = [case.get(part) for part in ("step_s", "forwarded_per_s", "trained_per_s", "tflops", "share_of_matmul")]
    lines = [" | ".join(str(value) for value in (name, *row, memory, case.get("first_step_s")))]
    if "profile" in case:
        profile = case["profile"]
        lines.append(f"   busy {profile['gpu_s']} of {profile['wall_s']} s: {profile['share']}")
    return lines


if __name__ == "__main__":
    main()

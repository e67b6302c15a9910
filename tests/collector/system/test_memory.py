"""Memory available to a collector: the machine's, or less under a control group's limit."""

from pathlib import Path

import pytest

from trainspan_collector.runtime.memory import available_memory_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("lines", "limits", "expected_mib"),
    [
        ("0::/app", {"app/memory.max": f"{512 * MIB}"}, 512),
        ("0::/slice/app", {"slice/memory.max": f"{256 * MIB}", "slice/app/memory.max": "max"}, 256),
        ("0::/", {"memory.max": f"{300 * MIB}"}, 300),
        ("0::/../outside", {"memory.max": f"{300 * MIB}"}, 300),
        (
            "5:cpu:/app\n4:memory:/docker/1",
            {"memory/docker/1/memory.limit_in_bytes": f"{128 * MIB}", "memory.max": "1"},
            128,
        ),
    ],
)
def test_the_least_limit_of_the_groups_counts(
    tmp_path: Path, lines: str, limits: dict[str, str], expected_mib: int
) -> None:
    membership = tmp_path / "membership"
    membership.write_text(lines + "\n")
    for name, limit in limits.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(limit + "\n")
    assert available_memory_bytes(tmp_path / "groups", membership) == expected_mib * MIB


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert available_memory_bytes(tmp_path, tmp_path / "none") == int(total.split()[1]) * 1024

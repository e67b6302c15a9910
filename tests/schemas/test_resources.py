"""Cores and memory of a process: the machine's, or less under a control group's limit."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from trainspan_schemas.resources import Limits, available_cores, available_memory_bytes, free_memory_bytes

MIB = 2**20
CORES = len(os.sched_getaffinity(0))
PlantLimits = Callable[[str, Mapping[str, str]], Limits]


@pytest.fixture
def plant(tmp_path: Path) -> PlantLimits:
    """Writes the lines of `/proc/self/cgroup`, and files of groups; the machine has 1,000 MiB of free memory."""

    def planted(lines: str, files: Mapping[str, str]) -> Limits:
        (tmp_path / "membership").write_text(lines + "\n")
        (tmp_path / "meminfo").write_text(f"MemTotal: 4096000 kB\nMemAvailable: {1000 * 1024} kB\nBuffers: 1 kB\n")
        for name, text in files.items():
            (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "groups" / name).write_text(text + "\n")
        return Limits(tmp_path / "groups", tmp_path / "membership", tmp_path / "meminfo")

    return planted


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
def test_the_least_memory_limit_of_the_groups_counts(
    plant: PlantLimits, lines: str, limits: dict[str, str], expected_mib: int
) -> None:
    assert available_memory_bytes(plant(lines, limits)) == expected_mib * MIB


@pytest.mark.parametrize(
    ("lines", "quotas", "expected"),
    [
        ("0::/app", {"app/cpu.max": "100000 100000"}, 1),
        ("0::/app", {"app/cpu.max": "10000 100000"}, 1),
        ("0::/app", {"app/cpu.max": "110000 100000"}, min(2, CORES)),
        ("0::/slice/app", {"slice/cpu.max": "50000 50000", "slice/app/cpu.max": "max 100000"}, 1),
        ("0::/app", {"app/cpu.max": "max 100000"}, CORES),
        ("0::/app", {"app/cpu.max": "99999900000 100000"}, CORES),
        ("0::/app", {"app/cpu.max": "not a quota"}, CORES),
        ("3:cpu,cpuacct:/app", {"cpu/app/cpu.cfs_quota_us": "90000", "cpu/app/cpu.cfs_period_us": "100000"}, 1),
        ("3:cpu,cpuacct:/lost", {"cpu/cpu.cfs_quota_us": "90000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("3:cpu,cpuacct:/app", {"cpu/app/cpu.cfs_quota_us": "-1", "cpu/app/cpu.cfs_period_us": "100000"}, CORES),
        ("3:cpuset:/app", {"cpuset/app/cpu.cfs_quota_us": "1", "cpuset/app/cpu.cfs_period_us": "100000"}, CORES),
    ],
)
def test_a_cpu_quota_limits_the_cores(plant: PlantLimits, lines: str, quotas: dict[str, str], expected: int) -> None:
    assert available_cores(plant(lines, quotas)) == expected


@pytest.mark.parametrize(
    ("lines", "files", "expected_mib"),
    [
        # 512 allowed, 400 used, of which 100 are file caches that are not in use.
        (
            "0::/app",
            {
                "app/memory.max": f"{512 * MIB}",
                "app/memory.current": f"{400 * MIB}",
                "app/memory.stat": f"anon {300 * MIB}\nactive_file 0\ninactive_file {100 * MIB}",
            },
            212,
        ),
        # The group above is the one that is nearly full.
        (
            "0::/slice/app",
            {
                "slice/memory.max": f"{900 * MIB}",
                "slice/memory.current": f"{850 * MIB}",
                "slice/app/memory.max": f"{800 * MIB}",
                "slice/app/memory.current": f"{10 * MIB}",
            },
            50,
        ),
        ("0::/app", {"app/memory.max": f"{MIB}", "app/memory.current": f"{2 * MIB}"}, 0),
        ("0::/app", {"app/memory.max": "max", "app/memory.current": f"{400 * MIB}"}, 1000),
        (
            "4:memory:/docker/1",
            {
                "memory/memory.limit_in_bytes": f"{300 * MIB}",
                "memory/memory.usage_in_bytes": f"{200 * MIB}",
                "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {30 * MIB}",
            },
            130,
        ),
    ],
)
def test_free_memory_is_what_the_group_has_left(
    plant: PlantLimits, lines: str, files: dict[str, str], expected_mib: int
) -> None:
    assert free_memory_bytes(plant(lines, files)) == expected_mib * MIB


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    nowhere = Limits(tmp_path, tmp_path / "none", Path("/proc/meminfo"))
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert available_memory_bytes(nowhere) == int(total.split()[1]) * 1024
    assert available_cores(nowhere) == CORES
    assert 0 < (free_memory_bytes(nowhere) or 0) <= available_memory_bytes(nowhere)


def test_free_memory_is_unknown_if_the_system_does_not_state_it(tmp_path: Path) -> None:
    assert free_memory_bytes(Limits(tmp_path, tmp_path / "none", tmp_path / "none")) is None

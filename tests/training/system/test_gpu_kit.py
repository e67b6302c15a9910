"""The kit for a machine with a GPU and no network: its parts survive the way there, and its steps run against today's trainer."""

import random
import re
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.gpu import bench, exact, figures, prepare, rounds, stock, summary
from benchmarks.gpu.fatbin import Cleared, clear_other_architectures
from tests.support.places import ROOT
from trainspan_schemas.config.load import load_settings

KIT = ROOT / "benchmarks" / "gpu"


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    return struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(code), 0, 0, 0, 0, architecture).ljust(64, b"\x07") + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(fatbins: bytes) -> bytearray:
    """An ELF file with the sections "" (empty), .nv_fatbin and .names."""
    names = b"\0.nv_fatbin\0.names\0"
    header = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", header, 0x28, 64 + len(fatbins) + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)
    sections = [(0, 0, 0), (1, 64, len(fatbins)), (12, 64 + len(fatbins), len(names))]
    table = b"".join(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 8, 0) for name, at, size in sections)
    return bytearray(bytes(header) + fatbins + names + table)


def test_machine_code_of_the_architecture_stays_and_all_other_device_code_is_zero() -> None:
    def fatbins(other: bytes) -> bytes:
        both = container(entry(2, 80, other * 4), entry(2, 90, b"hopp" * 2), entry(1, 90, other * 2))
        return both + bytes(8) + container(entry(2, 120, other * 6))

    data = library(fatbins(b"code"))
    assert clear_other_architectures(data, 90) == Cleared(kept=8, cleared=48, without=1)
    assert data == library(fatbins(bytes(4)))


def test_a_library_with_another_layout_is_refused_by_the_place() -> None:
    with pytest.raises(ValueError, match="no fatbin container at byte 64"):
        clear_other_architectures(library(b"\1" * 24), 90)


def test_packages_cut_into_folders_are_whole_again_after_the_last_one_arrived(tmp_path: Path) -> None:
    sites = {"first": {"one.py": b"1" * 5000}, "second": {"package/two.so": random.Random(0).randbytes(3000)}}
    archives = []
    for name, files in sites.items():
        for path, data in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True)
            (tmp_path / name / path).write_bytes(data)
        file = prepare.write_archive(tmp_path / name, tmp_path / f"{name}.tar.xz")
        archives.append(prepare.Archive(file, "site"))
    limit = 1400
    folders = prepare.cut(archives, limit, tmp_path / "all", "abc1234")
    assert len(folders) > 1
    assert all(sum(file.stat().st_size for file in folder.iterdir()) <= limit for folder in folders)

    said = []
    for folder in folders:  # each call brings one folder; the one before may be gone
        kit = tmp_path / "kits" / folder.name
        kit.mkdir(parents=True)
        folder.rename(kit / folder.name)
        said.append(unpacked(kit, tmp_path / "there"))
    assert "second.tar.xz" in said[0]
    assert "have arrived" in said[0]
    for files in sites.values():
        for path, data in files.items():
            assert (tmp_path / "there" / "site" / path).read_bytes() == data


def unpacked(kit: Path, scratch: Path) -> str:
    command = [sys.executable, str(KIT / "unpack.py"), str(kit), str(scratch)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_package_that_is_taken_along_has_a_pinned_version() -> None:
    pins = prepare.pins_of(ROOT / "constraints" / "gpu.txt")
    names = {*prepare.names_in("trainer-packages.txt"), *prepare.names_in("loop-packages.txt"), *prepare.LARGE}
    assert names - pins.keys() == {"gguf"}  # reads one file there; trainspan never imports it


def test_every_requirement_of_the_loop_is_taken_along_or_in_the_image() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[<>=; ]", text)[0] for text in prepare.needed_by_loop(project)}
    brought = {*prepare.names_in("trainer-packages.txt"), *prepare.names_in("loop-packages.txt"), *prepare.LARGE}
    assert needed - {*brought, *prepare.IMAGE} == set()


def test_each_kind_of_step_gives_its_figures_at_tiny_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench, exact, figures):
        monkeypatch.setattr(module, "TINY", True)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "bench-gpu.json")
    expected = exact.make_reference(tmp_path / "model")
    assert exact.compared(expected, exact.settings_of("packed", "float32"), tmp_path)["within"]
    ours = bench.measured(bench.Case("0.5B", "agent", {"forward": "auto", "weights": "token"}), tmp_path)
    adapted = bench.measured(bench.Case("0.5B", "agent", {"adapter": "lora"}), tmp_path)
    assert ours["trained_parameters"] == ours["parameters"] == adapted["parameters"] - adapted["trained_parameters"]
    theirs = stock.stock(tmp_path, 8)
    assert ours["trained_tokens"] == theirs["trained_tokens"] == 2 * 4 * 3 * 8
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def test_goals_compare_what_was_measured_and_say_what_was_not() -> None:
    rounds = [{"logp_diff_mean": 0.02, "seconds": {"save": 1.5, "swap": 0.75}}]
    whole = {
        "bench": {
            "1.5B_long_packed": {"share_of_matmul": 0.41, "peak_over_estimate": 1.2},
            "late": {"skipped": "after 145 s"},
        },
        "stock": {
            "stock_0.5B_agent_8_rows": {"trained_per_s": 100},
            "stock_0.5B_agent_32_rows": {"error": "out of memory"},
            "trainspan_0.5B_agent": {"trained_per_s": 650},
        },
        "policy": {"large": {"rounds": rounds}},
    }
    values = {what: value for what, value, _, _ in summary.goals(whole)}
    assert values["trained tokens/s over stock TRL's, six turns"] == 6.5
    assert values["peak memory over the estimate"] == 1.2
    assert values["save and swap of 1.5B, s"] == 2.25
    assert values["held-out success of the demo"] is None
    assert summary.verdict("peak", 1.2, 1.0, more=False) == "goal peak: 1.2, MISSED (at most 1)"
    assert summary.verdict("share", 0.41, 0.4, more=True) == "goal share: 0.41, reached (at least 0.4)"


@pytest.mark.parametrize("lines", ["", rounds.ADAPTER])
def test_the_settings_of_its_rounds_are_settings_of_now(tmp_path: Path, lines: str) -> None:
    (tmp_path / "trainspan.toml").write_text(rounds.settings_file(lines))
    settings = load_settings(tmp_path / "trainspan.toml", {}).train
    assert (settings.max_ratio, settings.adapter) == (1e30, "lora" if lines else "none")

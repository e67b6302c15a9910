"""Go and OpenTelemetry for Go from Debian's packages, unpacked into a folder: nothing is installed on the machine.

Any Debian of these years will do: the packages come from its mirror, but always from the release `RELEASE`, whose
OpenTelemetry has the OTLP exporters that older releases lack.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

__all__ = ["RELEASE", "GoToolchain"]

RELEASE: Final = "trixie"
KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
TOOLCHAIN: Final = ("golang-1.24-go", "golang-1.24-src")
MODULES: Final = tuple(
    f"golang-{name}-dev"
    for name in (
        "opentelemetry-otel",
        "opentelemetry-contrib",
        "opentelemetry-proto",
        "github-cenkalti-backoff",
        "github-felixge-httpsnoop",
        "github-go-logr-logr",
        "github-go-logr-stdr",
        "github-golang-protobuf-1-5",
        "github-google-uuid",
        "github-grpc-ecosystem-grpc-gateway",
        "golang-x-net",
        "golang-x-sys",
        "golang-x-text",
        "google-genproto",
        "google-grpc",
        "google-protobuf",
    )
)
"""What `programs/go` imports, with all that it imports in turn."""


@dataclass(frozen=True, slots=True)
class GoToolchain:
    """An unpacked toolchain with modules; `place` is its folder."""

    place: Path

    @classmethod
    def unpack(cls, place: Path) -> "GoToolchain":
        """Downloads about 65 MB; skips the test on a machine that has no Debian packages."""
        mirror = _mirror()
        if mirror is None:
            pytest.skip("no Debian packages here: Go and its OpenTelemetry are unpacked from them")
        for folder in ("lists/partial", "cache/archives/partial", "debs"):
            (place / folder).mkdir(parents=True)
        (place / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror} {RELEASE} main\n")
        (place / "apt.conf").write_text(
            f'Dir::Etc::sourcelist "{place}/sources.list";\nDir::Etc::sourceparts "-";\n'
            f'Dir::State::lists "{place}/lists";\nDir::Cache "{place}/cache";\nAPT::Sandbox::User "";\n'
        )
        environment = {**os.environ, "APT_CONFIG": str(place / "apt.conf")}
        for command in (["update"], ["download", *TOOLCHAIN, *MODULES]):
            subprocess.run(
                ["apt-get", "-q", *command],
                cwd=place / "debs",
                env=environment,
                check=True,
                timeout=300,
                capture_output=True,
            )
        for package in (place / "debs").glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, place], check=True, timeout=120)
        return cls(place)

    def build(self, program: Path, command: Path) -> None:
        """Compiles one source file; about 40 CPU seconds for the first one."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.place),
            "GOROOT": str(self.place / "usr/lib/go-1.24"),
            "GOPATH": str(self.place / "usr/share/gocode"),
            "GO111MODULE": "off",
            "GOTOOLCHAIN": "local",
        }
        go = self.place / "usr/lib/go-1.24/bin/go"
        subprocess.run([go, "build", "-o", command, program], cwd=self.place, env=environment, check=True, timeout=600)


def _mirror() -> str | None:
    """The address of the machine's own Debian mirror; None without one."""
    if not (shutil.which("apt-get") and shutil.which("dpkg") and Path(KEYRING).exists()):
        return None
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    return next((uri for uri in found if uri.rstrip("/").endswith("/debian")), None)

"""Reports in one line what this machine lacks for `make setup`, or prints which builds it gets: `cpu` or `gpu`.

Runs on any Python 3, in the folder of the repository.
"""

import os
import platform
import shutil
import sys

NEEDED_GIB = {"cpu": 6.0, "gpu": 14.0}
"""The environment, 5.0 GiB for a CPU; with CUDA 4.1 GiB of wheels, which pip keeps, and about twice that unpacked."""
LEAST_GLIBC = (2, 31)


def problem():
    """Returns one line that says what this machine or this Python lacks for any build, or None."""
    if not ((3, 11) <= sys.version_info[:2] < (3, 14)):
        return "Python %d.%d is not supported: install Python 3.11 to 3.13 and run `make %s PYTHON=python3.11`" % (
            sys.version_info[0],
            sys.version_info[1],
            os.environ.get("MAKE_GOAL") or "setup",
        )
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return (
            "%s on %s is not supported: vLLM's builds are for Linux on x86_64 (on macOS or Windows use a Linux VM, container or WSL2)"
            % (
                platform.system(),
                platform.machine(),
            )
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return "this Python has no venv module: install it (Debian: apt-get install python3-venv)"
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < LEAST_GLIBC:
        return "%s is not supported: packages are built for glibc %d.%d or later (Debian 11, Ubuntu 20.04)" % (
            (libc + " " + version).strip() or "this C library",
            LEAST_GLIBC[0],
            LEAST_GLIBC[1],
        )
    return None


def choose():
    """Returns the builds for this machine, and one line that says what it lacks for them, or None."""
    sys.path.insert(0, "schemas")
    from trainspan_schemas import gpus

    installed = gpus.installed_gpus()
    builds = "gpu" if installed.names and gpus.visible_gpus(os.environ, installed) else "cpu"
    if builds == "gpu" and installed.trouble:
        return builds, "%s: %s, or install CPU builds with `%s= make %s`" % (
            installed,
            installed.trouble,
            gpus.VISIBLE,
            os.environ.get("MAKE_GOAL") or "setup",
        )
    needed_gib = float(os.environ.get("TRAINSPAN_SETUP_GIB", NEEDED_GIB[builds]))
    free_gib = shutil.disk_usage(".").free / 2**30
    if free_gib < needed_gib:
        return builds, "%.1f GiB free here, %.0f GiB needed for the environment: free some disk or clone elsewhere" % (
            free_gib,
            needed_gib,
        )
    return builds, None


if __name__ == "__main__":
    message = problem()
    builds = ""
    if not message:
        builds, message = choose()
    if message:
        sys.exit("trainspan: " + message)
    sys.stdout.write(builds + "\n")

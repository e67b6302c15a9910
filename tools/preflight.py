"""Reports in one line what this machine lacks for `make setup`; runs on any Python 3."""

import os
import platform
import shutil
import sys


def problem():
    """Returns one line that says what to do, or None."""
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
    needed_gib = float(os.environ.get("TRAINSPAN_SETUP_GIB", "8"))
    free_gib = shutil.disk_usage(".").free / 2**30
    if free_gib < needed_gib:
        return "%.1f GiB free here, %.0f GiB needed for the environment: free some disk or clone elsewhere" % (
            free_gib,
            needed_gib,
        )
    return None


if __name__ == "__main__":
    message = problem()
    if message:
        sys.exit("trainspan: " + message)

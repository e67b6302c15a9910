"""The state folder and the paths in it: `$TRAINSPAN_HOME`, default `./.trainspan`."""

import contextlib
import hashlib
import os
import re
import secrets
from pathlib import Path

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.files.secret_files import check_is_own, check_is_private, make_secret_file

__all__ = [
    "checkpoints_dir",
    "datasets_dir",
    "digest_of",
    "home",
    "is_url",
    "make_home",
    "policy_dir",
    "remember_server",
    "remote_dir",
    "runs_dir",
    "served_model",
    "served_template",
    "served_url",
    "store_path",
    "token",
    "token_digest",
]


def home() -> Path:
    """The state folder, which may not exist yet.

    Raises ConfigError if it is `./.trainspan` and another user's, who would know the secrets in it and decide what runs. A
    folder that TRAINSPAN_HOME names is trusted, as a repository that GIT_DIR names.
    """
    if folder := os.environ.get("TRAINSPAN_HOME"):
        return Path(folder)
    path = Path(".trainspan")
    with contextlib.suppress(FileNotFoundError):
        check_is_own(path)
    return path


def make_home() -> Path:
    """The state folder, created with mode 0700 if it does not exist."""
    path = home()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def store_path(setting: str | None = None) -> Path:
    return Path(setting) if setting else home() / "spans.duckdb"


def datasets_dir(setting: str | None = None) -> Path:
    """The folder of datasets; of a URL, the folder of those that this machine has read from it."""
    if setting and is_url(setting):
        return remote_dir(setting) / "datasets"
    return Path(setting) if setting else home() / "dataset"


def is_url(location: str) -> bool:
    """Whether a place of datasets is under a URL, such as `s3://bucket/prefix`, and not a folder."""
    return "://" in location


def remote_dir(url: str) -> Path:
    """The folder of what this machine knows and has read of the datasets under a URL."""
    url = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:40]
    return home() / "remote" / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def checkpoints_dir(setting: str | None = None) -> Path:
    return Path(setting) if setting else home() / "checkpoints"


def policy_dir(root: Path, policy: str | None) -> Path:
    """The folder of a policy's datasets or checkpoints, under that of all policies; `root` if it is the only one."""
    return root if policy is None else root / policy


def runs_dir() -> Path:
    return home() / "runs"


def token() -> str:
    """The secret that authorizes swaps on the policy server; created on first use, file mode 0600.

    Raises ConfigError if it cannot be created or read, or others can read it.
    """
    path = home() / "token"
    if not path.exists():
        make_secret_file(path, secrets.token_urlsafe(32) + "\n")
    try:
        check_is_private(path, "token file")
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path} cannot be read: {error}") from error


def token_digest() -> str | None:
    """That of the token of this state folder; None if there is none yet."""
    return digest_of(token()) if (home() / "token").exists() else None


def digest_of(token: str) -> str:
    """What a policy server shows of its token, so that others see whose it is. It says nothing more: the token is random."""
    return hashlib.sha256(f"trainspan {token}".encode()).hexdigest()[:16]


def remember_server(model: str, url: str, template: str | None = None) -> None:
    """Records what `trainspan serve` was given: the default start of `trainspan train`, the root of its URL, its chat template."""
    of_file = str(Path(template).resolve()) if template and os.path.isfile(template) else ""  # it may be the text
    for name, value in (("served-model", model), ("served-url", url), ("served-template", of_file)):
        path = make_home() / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(value + "\n")
        temporary.replace(path)


def served_model() -> str | None:
    """The model that `trainspan serve` was last given: an absolute path or a Hugging Face id; None if it never ran."""
    return _remembered("served-model")


def served_template() -> str | None:
    """The file of the chat template with which `trainspan serve` was last started; None if it was the model's own."""
    return _remembered("served-template")


def served_url() -> str | None:
    """The root of the URL at which `trainspan serve` last listened, such as http://127.0.0.1:8000; None if it never ran."""
    return _remembered("served-url")


def _remembered(name: str) -> str | None:
    try:
        return (home() / name).read_text().strip() or None
    except FileNotFoundError:
        return None

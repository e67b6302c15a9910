"""Refuses data parallelism inside vLLM: of several engines, a swap would get the result of the first one only.

vLLM calls all engines to load weights but returns one result, and distributes the canary's requests among them: an
engine that kept the earlier weights would go unnoticed.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainspan_schemas.errors import ConfigError

__all__ = ["refuse_replicas", "replicas_of"]

_VARIABLE = "VLLM_DP_SIZE"
_IN_YAML = re.compile(r"""^[^#\n]*?\bdata[-_]parallel[-_]size\b["']?\s*:\s*["']?(\d+)""", re.MULTILINE)


def refuse_replicas(size: int, said_by: str) -> None:
    """Raises ConfigError if there is more than one engine."""
    if size > 1:
        raise ConfigError(
            f"{said_by} asks for {size} engines, but a swap can be verified on one only: start one policy server per "
            "engine, or split the model with --tensor-parallel-size"
        )


def replicas_of(flags: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Returns how many engines vLLM's flags, their `--config` file or the environment ask for, and which one does."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--data-parallel-size", "-dp")
    parser.add_argument("--config")
    known, _ = parser.parse_known_args([_with_dashes(flag) for flag in flags])
    if known.data_parallel_size is not None:
        return _number(known.data_parallel_size), "--data-parallel-size"
    if known.config and (in_yaml := _IN_YAML.search(_text(Path(known.config)))):
        return int(in_yaml[1]), f"data-parallel-size in {known.config}"
    return _number(environ.get(_VARIABLE, "1")), _VARIABLE


def _with_dashes(flag: str) -> str:
    """Replaces underscores: vLLM also accepts `--data_parallel_size`."""
    name, equals, value = flag.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value


def _number(text: str) -> int:
    """Returns 1 for an invalid number, which vLLM itself reports."""
    return int(text) if text.isdigit() else 1


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""

"""The checkpoint contract: folder names, `trainspan.json` and `canary.json`, and the text file `latest`.

A checkpoint is written completely under a temporary name, then renamed; `latest` is updated afterwards, also by a rename.

A checkpoint of kind `full` is a model folder: config, safetensors, tokenizer with chat template.
One of kind `lora` is an adapter folder as peft writes it (`adapter_config.json`, `adapter_model.safetensors`), with the
tokenizer and chat template; `config.json` and the model weights are in `base`. Each version has its own folder.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.files.durable import JsonObject, sha256_of

__all__ = [
    "CANARY_FILE",
    "LATEST",
    "META_FILE",
    "Canary",
    "CanaryPrompt",
    "CheckpointMeta",
    "base_beside",
    "base_digest",
    "checkpoint_name",
    "digest_of_model",
    "hash_weights",
    "join_hashes",
    "read_latest",
    "write_latest",
]

META_FILE: Final = "trainspan.json"
CANARY_FILE: Final = "canary.json"
LATEST: Final = "latest"
_DIGESTED_BYTES: Final = 1024
"""Bytes of each tensor that enter the digest."""


def checkpoint_name(version: int) -> str:
    """The folder name of a policy version, e.g. `policy-000007`."""
    return f"policy-{version:06d}"


def hash_weights(folder: Path) -> str:
    """Computes the `weights_sha256` of a folder from its safetensors files."""
    return join_hashes([sha256_of(path) for path in sorted(folder.glob("*.safetensors"))])


def join_hashes(hashes: Sequence[str]) -> str:
    """One sha256 for weights in several files: the hash of their joined hex hashes, by file name; one file keeps its own hash."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def base_digest(folder: Path) -> str | None:
    """The digest of the model that training began with: from `trainspan.json`, else the folder's own. Raises CheckpointError."""
    return CheckpointMeta.read(folder).base_digest if (folder / META_FILE).is_file() else digest_of_model(folder)


def base_beside(folder: Path, base: Any) -> Any:
    """The base that a file in `folder` names, in full: one that begins with `.` is relative to the folder."""
    return str((folder / base).resolve()) if isinstance(base, str) and base.startswith(".") else base


def digest_of_model(folder: Path) -> str:
    """32 hex digits that identify a model's weights, independent of how they are split into files.

    They hash the names, types, shapes and first bytes of the tensors, so little is read.
    Raises CheckpointError if a file is damaged.
    """
    seen: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > path.stat().st_size:
                    raise ValueError("the header is cut off")
                for name, entry in json.loads(file.read(length)).items():
                    if name == "__metadata__":
                        continue
                    begin, end = entry["data_offsets"]
                    file.seek(8 + length + begin)
                    seen[name] = (entry["dtype"], entry["shape"], file.read(min(end - begin, _DIGESTED_BYTES)).hex())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
    return hashlib.sha256(json.dumps(sorted(seen.items())).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """`trainspan.json`: the kind and origin of the weights."""

    kind: Literal["full", "lora"]
    version: int
    parent: str | None
    """Name of the checkpoint, or path of the model, from which the training started."""
    base: str
    """Model path or Hugging Face id that the run started from; the weights under an adapter of kind `lora`.

    In the file, a path that begins with `.` is relative to the folder: an adapter and its base may be moved together.
    """
    dataset_sha256: str | None
    """Hash of the manifest of the dataset that it was trained on."""
    weights_sha256: str | None = None
    policy: str | None = None
    """Name of the policy whose calls it was trained on; None if its datasets name no policy."""
    base_digest: str | None = None
    """`digest_of_model` of `base`, which identifies it whatever its path; None in checkpoints that do not record it."""
    micro_batch_tokens: int | None = None
    """Tokens per forward pass that its steps were planned with; a different number changes the rounding of the same steps."""
    tree_tokens: int | None = None
    """The same of a pass that holds the rows of one rollout only, as a prefix tree."""
    adam_rounds: int = 0
    """Number of updates in Adam's state: since the start model, or since a state that was lost."""
    weights_files: Mapping[str, str] | None = None
    """Safetensors file → its sha256, from which `weights_sha256` is joined; None in checkpoints that do not record it."""

    def write(self, folder: Path) -> None:
        (folder / META_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "CheckpointMeta":
        """Reads the file. Raises CheckpointError if it is missing or malformed."""
        try:
            raw: JsonObject = json.loads((folder / META_FILE).read_text())
            raw["base"] = base_beside(folder, raw.get("base"))
            raw["adam_rounds"] = raw.get("adam_rounds") or 0
            return cls(**{name: raw.get(name) for name in cls.__dataclass_fields__})  # type: ignore[arg-type]
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} has no {META_FILE}: it is not a trainspan checkpoint") from error
        except OSError as error:
            raise CheckpointError(f"{folder / META_FILE} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / META_FILE} is malformed: {error}") from error


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """One scored sequence: P prompt tokens, then C fixed completion tokens."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs_new: list[float]
    """(C,) log-probabilities at temperature 1 under this checkpoint, by the trainer."""
    logprobs_parent: list[float]
    """(C,) the same under the weights from which training started."""


@dataclass(frozen=True, slots=True)
class Canary:
    """`canary.json`: the log-probabilities that a server with these weights must return."""

    dtype: str
    """Data type in which the scores were computed, e.g. "float32"."""
    prompts: list[CanaryPrompt]

    def write(self, folder: Path) -> None:
        (folder / CANARY_FILE).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Canary":
        """Reads the file. Raises CheckpointError if it is missing or malformed."""
        try:
            raw = json.loads((folder / CANARY_FILE).read_text())
            return cls(raw["dtype"], [CanaryPrompt(**prompt) for prompt in raw["prompts"]])
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} has no {CANARY_FILE}") from error
        except OSError as error:
            raise CheckpointError(f"{folder / CANARY_FILE} cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / CANARY_FILE} is malformed: {error}") from error


def read_latest(checkpoints: Path) -> Path | None:
    """The folder of the newest good checkpoint; None if nothing was published.

    Raises CheckpointError if it is missing, or if it cannot be read which one that is.
    """
    try:
        name = (checkpoints / LATEST).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{checkpoints / LATEST} cannot be read ({error.strerror}): write the name of a checkpoint into it, or choose another "
            "--checkpoints"
        ) from error
    folder = checkpoints / name
    if not name or "/" in name or not folder.is_dir():
        raise CheckpointError(
            f"{checkpoints / LATEST} names {name!r}, which is not a folder there: write the name of one into it"
        )
    return folder


def write_latest(checkpoints: Path, name: str) -> None:
    """Points `latest` at the checkpoint `name`, atomically."""
    temporary = checkpoints / f".{LATEST}.{os.getpid()}"
    temporary.write_text(name + "\n")
    temporary.replace(checkpoints / LATEST)

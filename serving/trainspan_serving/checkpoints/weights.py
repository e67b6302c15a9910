"""Reads the outline of a folder of weights without loading them, and checks it against the served model.

A swap is validated here first: if a folder does not fit, vLLM's `reload_weights` kills the engine or silently keeps old
tensors.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.files.durable import JsonObject

__all__ = ["Weights", "check_fits", "has_tokenizer", "read_json", "read_shapes", "read_weights", "weight_files"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CONFIG_IGNORED = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
"""Keys that do not affect the computation."""
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Name suffixes of buffers that models compute themselves; vLLM ignores them in a file."""
_CHUNK_BYTES = 2**24
_HEADS = ("lm_head.weight", "embed_out.weight")
"""Name suffixes of output heads."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The outline of a folder of full weights."""

    folder: Path
    config: JsonObject
    tensors: dict[str, tuple[int, ...]]
    """Tensor name → shape."""
    tokenizer_sha256: str


def read_weights(folder: Path) -> Weights:
    """Reads config, safetensors headers and tokenizer. Raises CheckpointError if something is missing or damaged."""
    config = read_json(folder / "config.json")
    return Weights(folder, config, _read_tensors(folder), _hash_vocabulary(folder))


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def check_fits(candidate: Weights, served: Weights) -> None:
    """Raises CheckpointError with the first difference between `candidate` and the served model.

    Either may lack tensors that have no effect in the other: buffers that models compute, and the copy of the embedding
    as output head of a model that ties the two.
    """
    name = candidate.folder.name
    for key in sorted((candidate.config.keys() & served.config.keys()) - _CONFIG_IGNORED):
        if candidate.config[key] != served.config[key]:
            raise CheckpointError(
                f"{name} does not fit the served model: config {key} is {candidate.config[key]!r}, "
                f"served is {served.config[key]!r}; start a server with this checkpoint instead"
            )
    missing = sorted(name for name in served.tensors.keys() - candidate.tensors.keys() if not _is_idle(served, name))
    if missing:
        raise CheckpointError(f"{name} lacks {len(missing)} tensors, first {missing[0]!r}: save the whole model")
    unknown = sorted(name for name in candidate.tensors.keys() - served.tensors.keys() if not _is_idle(candidate, name))
    if unknown:
        raise CheckpointError(f"{name} has {len(unknown)} tensors that the served model lacks, first {unknown[0]!r}")
    for tensor, shape in sorted(candidate.tensors.items()):
        if shape != served.tensors.get(tensor, shape):
            raise CheckpointError(
                f"{name}: tensor {tensor!r} has shape {list(shape)}, the served model's has {list(served.tensors[tensor])}"
            )
    if candidate.tokenizer_sha256 != served.tokenizer_sha256:
        raise CheckpointError(
            f"{name} has a different vocabulary than the served model; start a server with it instead"
        )


def _is_idle(weights: Weights, tensor: str) -> bool:
    """Whether the model computes the same without this tensor of its files."""
    return tensor.endswith(_COMPUTED) or (tensor.endswith(_HEADS) and _is_tied(weights, tensor))


def _is_tied(weights: Weights, head: str) -> bool:
    """Whether a stored output head is a copy of another tensor and the configuration does not untie them.

    vLLM and transformers use the same rule: a stored head that differs from the embedding is separate, whatever the
    configuration says.
    """
    text = weights.config.get("text_config")
    stated = [config.get("tie_word_embeddings") for config in (weights.config, text) if isinstance(config, dict)]
    if False in stated:
        return False
    alike = [name for name, shape in weights.tensors.items() if name != head and shape == weights.tensors[head]]
    contents = _digests(weights.folder, {head, *alike})
    return any(contents[name] == contents[head] for name in alike)


def _digests(folder: Path, names: set[str]) -> dict[str, str]:
    """Hashes dtype and bytes of the named tensors."""
    digests: dict[str, str] = {}
    for file in weight_files(folder):
        start, entries = _read_header(file)
        with file.open("rb") as stream:
            for name in names & entries.keys():
                begin, end = entries[name]["data_offsets"]
                stream.seek(start + begin)
                digest = hashlib.sha256(str(entries[name]["dtype"]).encode())
                for size in [_CHUNK_BYTES] * ((end - begin) // _CHUNK_BYTES) + [(end - begin) % _CHUNK_BYTES]:
                    digest.update(stream.read(size))
                digests[name] = digest.hexdigest()
    return digests


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder of full weights. Raises CheckpointError if there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / str(name) for name in read_json(index).get("weight_map", {}).values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder.name} has no *.safetensors file")
    return files


def _read_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        tensors.update(read_shapes(file))
    return tensors


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Returns the tensor names and shapes of a safetensors file. Raises CheckpointError if it is damaged or cut off."""
    return {name: tuple(entry["shape"]) for name, entry in _read_header(file)[1].items()}


def _read_header(file: Path) -> tuple[int, dict[str, JsonObject]]:
    """Returns the offset of a safetensors file's data, and the header's entry for each tensor.

    Format: https://huggingface.co/docs/safetensors/index#format
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            size = file.stat().st_size
            if length > size:
                raise ValueError("the header is cut off")
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if size != 8 + length + end:
            raise ValueError(f"it has {size} bytes instead of {8 + length + end}")
        for entry in entries.values():
            tuple(entry["shape"])
        return 8 + length, entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{file.parent.name}/{file.name} is not a complete safetensors file: {error}") from error


def _hash_vocabulary(folder: Path) -> str:
    file = next((folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder.name} has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    if file.name != "tokenizer.json":
        return hashlib.sha256(file.read_bytes()).hexdigest()
    tokenizer = read_json(file)
    added = [[token.get("id"), token.get("content")] for token in tokenizer.get("added_tokens") or []]
    vocabulary = [tokenizer.get("model", {}).get("vocab"), tokenizer.get("model", {}).get("merges"), added]
    return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()


def read_json(file: Path) -> JsonObject:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent.name} has no {file.name}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file.parent.name}/{file.name} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file.parent.name}/{file.name} is damaged: not a JSON object")
    return value

"""Search in the trained answers of a dataset, as text."""

import contextlib
from collections.abc import Sequence
from typing import Final

import polars as pl

from trainspan_processing.dataset.published import Published
from trainspan_processing.text.token_text import Decoder, find_decoder
from trainspan_processing.text.tokenizer_places import tokenizer_places
from trainspan_schemas.artifacts.checkpoint import read_latest
from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_schemas.errors import TrainspanError
from trainspan_viewer.queries.result_cache import ResultCache
from trainspan_viewer.queries.sources import Sources

__all__ = ["models_of", "rollouts_with_text"]

_MOST_TOKENS: Final = 50_000_000
"""Of the answers that a search reads: about 15 s."""
_PART: Final = 2_000
"""Answers that are decoded at a time."""
_searched: Final[ResultCache[tuple[list[str], str]]] = ResultCache(20_000_000)


def rollouts_with_text(
    sources: Sources, published: Published, run_id: str | None, text: str, notes: list[str]
) -> list[str]:
    """Ids of the rollouts with an answer that contains `text`; what was not searched is added to `notes`.

    `run_id` is the run of the dataset. One file of the dataset is in memory at a time.
    """
    decoder = _decoder_of(published, models_of(sources, run_id))
    if decoder is None:
        notes.append("Only ids were searched: there is no tokenizer to read the answers with.")
        return []
    key = (published.path, manifest_path(published.path).stat().st_mtime_ns, decoder.model, text)
    rollouts, note = _searched.get(key, lambda: _search(published, decoder, text), is_live=False)
    if note:
        notes.append(note)
    return rollouts


def _search(published: Published, decoder: Decoder, text: str) -> tuple[list[str], str]:
    """The ids, and what was not searched."""
    ids: dict[str, None] = {}
    searched, tokens = 0, 0
    for rows in published.files(["rollout_id", "completion_ids"]):
        for part in rows.iter_slices(_PART):
            if tokens >= _MOST_TOKENS:
                return list(ids), f"Only the first {searched} of {published.manifest['rows']} answers were searched."
            answers = decoder.texts(part["completion_ids"].to_list())
            ids |= {
                rollout: None for rollout, answer in zip(part["rollout_id"], answers, strict=True) if text in answer
            }
            searched += part.height
            tokens += int(part["completion_ids"].list.len().sum())
    return list(ids), ""


def models_of(sources: Sources, run_id: str | None) -> tuple[str | None, ...]:
    """Models whose tokenizer may fit, those of the run first."""
    models: list[str | None] = []
    if run_id is not None:
        try:
            run = sources.paths.run(run_id)
            settings = run.read("run.json").get("settings", {})
        except (TrainspanError, OSError, ValueError):
            pass
        else:
            with contextlib.suppress(TrainspanError):
                latest = read_latest(run.checkpoints)
                models.append(str(latest) if latest else None)
            models += [settings.get(section, {}).get("model") for section in ("serving", "train")]
    return (*models, *tokenizer_places(None, sources.settings))


def _decoder_of(published: Published, models: Sequence[str | None]) -> Decoder | None:
    greatest = published.rows([pl.col("completion_ids").list.max().alias("id")])["id"].drop_nulls().to_list()
    return find_decoder(models, covering=greatest)

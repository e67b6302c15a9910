"""Search in the trained answers of a dataset, as text."""

from typing import Final

import polars as pl

from trainspan_processing.dataset.published import Published
from trainspan_processing.text.token_text import Decoder, find_decoder
from trainspan_schemas.checkpoint import read_latest
from trainspan_schemas.errors import TrainspanError
from trainspan_schemas.home import checkpoints_dir, served_model
from trainspan_viewer.queries.sources import Sources

__all__ = ["decoder_of", "rollouts_with_text"]

_MOST_ROWS: Final = 20_000


def rollouts_with_text(sources: Sources, published: Published, text: str, notes: list[str]) -> list[str]:
    """Ids of the rollouts with an answer that contains `text`; what was not searched is added to `notes`."""
    decoder = decoder_of(sources, published)
    if decoder is None:
        notes.append("Only ids were searched: there is no tokenizer to read the answers with.")
        return []
    rows = published.rows(["rollout_id", "completion_ids"])
    if rows.height > _MOST_ROWS:
        notes.append(f"Only the first {_MOST_ROWS} of {rows.height} answers were searched.")
    found: dict[str, None] = {}
    for part in rows.head(_MOST_ROWS).iter_slices(2000):
        answers = decoder.texts(part["completion_ids"].to_list())
        found |= {rollout: None for rollout, answer in zip(part["rollout_id"], answers, strict=True) if text in answer}
    return list(found)


def decoder_of(sources: Sources, published: Published) -> Decoder | None:
    """The tokenizer of the run's checkpoints, else of the model that was served last."""
    folders = [published.path.parent.parent / "checkpoints", checkpoints_dir(sources.settings.serving.checkpoints)]
    latest: list[str | None] = []
    for folder in folders:
        try:
            latest.append(str(read_latest(folder)))
        except TrainspanError:
            continue
    candidates = [*latest, sources.settings.serving.model, served_model(), sources.settings.train.model]
    decoder = find_decoder(candidates)
    greatest = published.rows([pl.col("completion_ids").list.max().alias("id")])["id"].to_list()
    return decoder if decoder is not None and decoder.covers([one for one in greatest if one is not None]) else None

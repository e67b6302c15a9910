"""Candidate models for the tokenizer that decodes stored token ids."""

from trainspan_processing.text.token_text import load_decoder
from trainspan_schemas.artifacts.checkpoint import read_latest
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import TrainspanError
from trainspan_schemas.home import checkpoints_dir, served_model

__all__ = ["tokenizer_places"]


def tokenizer_places(model: str | None, chosen: Settings) -> tuple[str | None, ...]:
    """Models whose tokenizer may fit, most likely first; only `model` if the user named one.

    Raises UsageError if `model` has no tokenizer.
    """
    if model is not None:
        load_decoder(model)
        return (model,)
    try:
        latest = read_latest(checkpoints_dir(chosen.serving.checkpoints))
    except TrainspanError:
        latest = None
    return (chosen.serving.model, served_model(), chosen.train.model, str(latest) if latest else None)

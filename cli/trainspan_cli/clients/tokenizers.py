"""Where a tokenizer may lie that turns stored token ids into text."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainspan_schemas.settings import Settings

__all__ = ["tokenizer_places"]


def tokenizer_places(model: str | None, chosen: "Settings") -> tuple[str | None, ...]:
    """Models whose tokenizer may fit, the surest first. `model` is one that the user named: it must have one.

    Raises UsageError where it has none.
    """
    from trainspan_processing.text.token_text import load_decoder
    from trainspan_schemas.checkpoint import read_latest
    from trainspan_schemas.errors import TrainspanError
    from trainspan_schemas.home import checkpoints_dir, served_model

    if model is not None:
        load_decoder(model)
        return (model,)
    try:
        latest = read_latest(checkpoints_dir(chosen.serving.checkpoints))
    except TrainspanError:
        latest = None
    return (chosen.serving.model, served_model(), chosen.train.model, str(latest) if latest else None)

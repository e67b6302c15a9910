"""A tokenizer with one token per byte, plus the ChatML tokens; enough to decode, and created instantly."""

from pathlib import Path

MARKS = ["<|im_start|>", "<|im_end|>"]


def make_byte_tokenizer(folder: Path) -> Path:
    """Writes `tokenizer.json`; returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(alphabet) + len(MARKS)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([""], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def encode(model: str | Path, text: str) -> list[int]:
    """Returns the ids of `text`."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(Path(model) / "tokenizer.json")).encode(text).ids
    return ids

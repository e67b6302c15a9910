"""Creates a small model with random weights that knows nothing, for a run without any pretrained model.

python student.py MODEL_DIR
"""

import itertools
import sys
from pathlib import Path

from problems import SYSTEM, problems

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_llama import make_model, make_tokenizer


def make_student(folder: Path, seed: int = 0) -> None:
    """Writes a Llama of about a million float32 weights and a tokenizer of words and single digits."""
    texts = [row["messages"][-1]["content"] for row in itertools.islice(problems(seed), 500)]
    words = [SYSTEM, "system user assistant", "calc: result: answer:"] * 100
    tokenizer = make_tokenizer([*texts, *words], vocab_size=512)
    make_model(tokenizer, layers=4, context=512, tied=True, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_student(Path(sys.argv[1]))

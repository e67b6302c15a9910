"""Creates the model of the walk: a tokenizer, a small Llama, and a warm-up on imperfect demonstrations.

python policy.py MODEL_DIR
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from problems import demonstration
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STEPS, BATCH, LEARNING_RATE = 250, 64, 3e-3
IGNORED = -100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with single digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    generator = random.Random(0)
    corpus = [
        f"user assistant {question} {answer}" for question, answer in (demonstration(generator) for _ in range(500))
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).to(torch.float32)


def batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (ids, labels) of shape (BATCH, T) endlessly; only the answers have labels."""
    generator = random.Random(1)
    while True:
        rows = []
        for _ in range(BATCH):
            question, answer = demonstration(generator)
            prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
            rows.append((prompt, tokenizer.encode(f"{answer}<|im_end|>")))
        width = max(len(prompt) + len(own) for prompt, own in rows)
        ids = [prompt + own + [tokenizer.pad_token_id] * (width - len(prompt) - len(own)) for prompt, own in rows]
        labels = [[IGNORED] * len(prompt) + own + [IGNORED] * (width - len(prompt) - len(own)) for prompt, own in rows]
        yield torch.tensor(ids), torch.tensor(labels)


def make_policy(folder: Path) -> float:
    """Writes the warmed-up model to `folder`; returns the last loss in nats per token."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    model.train()
    value = 0.0
    for _, (ids, labels) in zip(range(STEPS), batches(tokenizer), strict=False):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        value = float(loss.detach())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return value


if __name__ == "__main__":
    print(make_policy(Path(sys.argv[1])))

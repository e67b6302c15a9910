"""The small models that examples create from scratch: tokenizer, random weights, supervised warm-up."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "batches", "make_model", "make_tokenizer", "prompt_and_answer", "warm_up"]

IGNORED = -100

# Each message ends as the model would end it, so that the tokens of a conversation are a prefix of its continuation.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(corpus: Iterable[str], vocab_size: int, *, single_digits: bool = True) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with `CHAT_TEMPLATE`; its numbers are single digits, or merged like other text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=single_digits), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, layers: int, context: int, tied: bool = False, seed: int = 0
) -> LlamaForCausalLM:
    """Builds a Llama of width 128 with random float32 weights; `tied`: the output head is the embedding."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).to(torch.float32)


def prompt_and_answer(
    tokenizer: PreTrainedTokenizerFast, prompt: list[dict[str, str]], answer: str
) -> tuple[list[int], list[int]]:
    """Returns (ids, labels), each (T,): the answer's tokens and its end have labels, the prompt's do not."""
    text: Any = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    asked, own = tokenizer.encode(text), tokenizer.encode(f"{answer}<|im_end|>")
    return asked + own, [IGNORED] * len(asked) + own


def batches(
    rows: Iterator[tuple[list[int], list[int]]], size: int, pad: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (ids, labels) of shape (size, T), padded on the right."""
    while True:
        drawn = [next(rows) for _ in range(size)]
        width = max(len(ids) for ids, _ in drawn)
        padded = [ids + [pad] * (width - len(ids)) for ids, _ in drawn]
        labels = [own + [IGNORED] * (width - len(own)) for _, own in drawn]
        yield torch.tensor(padded), torch.tensor(labels)


def warm_up(
    model: LlamaForCausalLM,
    drawn: Iterator[tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    learning_rate: float = 0.02,
) -> float:
    """Supervised training with a cosine schedule; returns the mean loss of the last 20 steps, nats per token.

    Matrices of the layers are trained with Muon at `learning_rate`, which needs half the steps of AdamW; the rest with AdamW.
    """
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    known = set(map(id, matrices))
    others = [weight for weight in model.parameters() if id(weight) not in known]
    optimizers = [
        torch.optim.Muon(matrices, lr=learning_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=learning_rate / 4, betas=(0.9, 0.95), weight_decay=0.01),
    ]

    def share(step: int) -> float:
        return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share) for optimizer in optimizers]
    recent: list[float] = []
    model.train()
    for _, (ids, labels) in zip(range(steps), drawn, strict=False):
        # Padding is on the right and attention is causal: no mask is needed.
        loss: Any = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in (*optimizers, *schedules):
            one.step()
        model.zero_grad()
        recent = [*recent[-19:], float(loss.detach())]
    return sum(recent) / len(recent)

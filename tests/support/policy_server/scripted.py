"""A policy whose answers are forced token by token to a script, in a real engine, which alone imports this.

SCRIPT names a JSON file with rules `[pattern, answer]`: the answer of the first rule whose pattern is found in the prompt's text
is sampled, with log-probability 0, and the end of the turn after it; `$1` in the answer is what the pattern's first group matched.
The file is read anew for each request.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality


class Scripted(LogitsProcessor):
    """Allows only the next token of each request's answer."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        self._script = Path(os.environ["SCRIPT"])
        self._answers: dict[int, tuple[list[int], list[int]]] = {}
        """Index in the batch → tokens of the answer, and those so far."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._answers.pop(index, None)
        for index, _, prompt, output in batch_update.added:
            self._answers[index] = self._answer(prompt or []), output
        for one, other, direction in batch_update.moved:
            moved, replaced = self._answers.pop(one, None), self._answers.pop(other, None)
            if moved is not None:
                self._answers[other] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._answers[one] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (answer, output) in self._answers.items():
            token = answer[min(len(output), len(answer) - 1)]
            logits[index] = float("-inf")
            logits[index, token] = 0.0
        return logits

    def _answer(self, prompt: list[int]) -> list[int]:
        text = self._tokenizer.decode(prompt)
        for pattern, answer in json.loads(self._script.read_text()):
            if match := re.search(pattern, text):
                filled = answer.replace("$1", match[1] or "") if match.groups() else answer
                return [*self._tokenizer.encode(filled, add_special_tokens=False), self._tokenizer.eos_token_id]
        return [*self._tokenizer.encode("no rule", add_special_tokens=False), self._tokenizer.eos_token_id]

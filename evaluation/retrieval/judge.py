"""The judges of the retrieval agent: found document and words of the answer, and a coin for the control run."""

import hashlib
import re
from collections import Counter
from typing import Any

FOUND, ANSWERED = 0.4, 0.6
"""Shares of the two parts of the reward."""


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9.,%$]*[a-z0-9%]", text.lower())


def f1(answer: str, truth: str) -> float:
    """Returns the harmonic mean of precision and recall over words, as in SQuAD (Rajpurkar et al. 2016)."""
    given, wanted = Counter(words(answer)), Counter(words(truth))
    shared = (given & wanted).total()
    return 2 * shared / (given.total() + wanted.total()) if shared else 0.0


def parts(task: dict[str, Any], result: Any) -> tuple[float, float]:
    """Returns whether a gold document was found, and F1 of the answer; an answer that was not looked up counts nothing."""
    value = result.value if isinstance(result.value, dict) else {}
    found = float(bool(set(task["meta"]["stated_in"]) & set(value.get("found") or ())))
    return found, found * f1(str(value.get("answer", "")), task["answer"])


def dense(task: dict[str, Any], result: Any) -> float:
    """Returns 0.4 for finding a gold document, and up to 0.6 for the answer."""
    found, answered = parts(task, result)
    return FOUND * found + ANSWERED * answered


def coin(task: dict[str, Any], result: Any) -> float:
    """Returns a random reward for training, 1.0 for half of all rollouts; for validation the real one."""
    if task.get("split") == "val":
        return dense(task, result)
    return float(hashlib.sha256(result.rollout_id.encode()).digest()[0] & 1)

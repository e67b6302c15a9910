"""The banking documents of τ²-bench, as inspect-evals contains them, and the facts in them."""

import functools
import gzip
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

__all__ = ["Document", "Fact", "documents", "facts"]

FACT = re.compile(r"(?:[-•]|\d+\.)?\s*([A-Z][A-Za-z0-9 %/'()&-]{5,60}): (.{1,40}?)\.?")
MAX_WORDS = 6
"""Words of a fact's value; longer ones are sentences."""


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    title: str
    content: str

    @property
    def product(self) -> str:
        """The product or subject, from the id: `doc_credit_cards_ecocard_008` is about `ecocard`."""
        return re.sub(r"^doc_|_\d+$", "", self.id)

    @property
    def lines(self) -> list[str]:
        """The lines with text, without Markdown's marks."""
        found = (re.sub(r"\*\*|^#+ ", "", line.strip()) for line in self.content.splitlines())
        return [line for line in found if line]


@dataclass(frozen=True, slots=True)
class Fact:
    """One `key: value` of a product, and the documents that state it."""

    product: str
    key: str
    value: str
    stated_in: tuple[str, ...]


@functools.cache
def documents() -> tuple[Document, ...]:
    """Reads all documents; inspect_evals is located, not imported."""
    spec = find_spec("inspect_evals")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("inspect-evals is not installed: run `python -m evaluation run retrieval`, which installs it")
    folder = Path(spec.submodule_search_locations[0]) / "tau2" / "data" / "domains" / "banking_knowledge"
    found = json.loads(gzip.decompress((folder / "documents.json.gz").read_bytes()))
    return tuple(Document(one["id"], one["title"], one["content"]) for one in found)


def facts(all_documents: tuple[Document, ...]) -> list[Fact]:
    """Returns the facts that a product's documents state in one line and without contradiction."""
    stated: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for document in all_documents:
        for line in document.lines:
            match = FACT.fullmatch(line)
            if match and len(match[2].split()) <= MAX_WORDS and "not available" not in match[2]:
                stated[document.product, match[1]][match[2]].append(document.id)
    return [
        Fact(product, key, value, tuple(dict.fromkeys(ids)))
        for (product, key), values in stated.items()
        if len(values) == 1
        for value, ids in values.items()
    ]

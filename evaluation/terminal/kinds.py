"""Kinds of terminal tasks: what is asked, the work folder before and after, and commands that do it."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["KINDS", "STEMS", "UNSEEN", "Wanted"]

STEMS = (
    *("notes", "items", "list", "data", "report", "stock", "orders", "diary", "plan", "menu", "rooms", "books"),
    *("songs", "trips", "bills", "parts", "teams", "games", "tools", "seeds", "pets", "boats", "towns", "maps"),
    *("tests", "cards", "files", "names", "days", "jobs"),
)
"""Names of the files that tasks are about."""
OUTPUTS = ("out", "result", "answer", "new", "final", "copy")
WORDS: tuple[str, ...] = (
    "apple",
    "lamp",
    "chair",
    "stone",
    "river",
    "cloud",
    "paper",
    "glass",
    "horse",
    "bread",
    "candle",
    "window",
)
KEYS = ("port", "size", "level", "speed", "limit", "depth")
TYPOS = (("helo", "hello"), ("wrold", "world"), ("recieve", "receive"), ("teh", "the"), ("adress", "address"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """One task."""

    text: str
    before: Mapping[str, str]
    """Path → content of every file of the work folder."""
    after: Mapping[str, str]
    """The same when the task is done."""
    commands: tuple[str, ...]
    """What a careful user would enter."""


def _lines(words: list[str]) -> str:
    return "".join(f"{word}\n" for word in words)


def _entries(generator: random.Random, words: list[str]) -> list[str]:
    """Returns 12 to 20 lines, each of one of the words and a number."""
    return [f"{generator.choice(words)} {generator.randint(10, 99)}" for _ in range(generator.randint(12, 20))]


def _with(entries: list[str], word: str) -> int:
    return sum(word in entry for entry in entries)


def count(generator: random.Random, stem: str) -> Wanted:
    words, out = generator.sample(WORDS, 3), f"{generator.choice(OUTPUTS)}.txt"
    entries = _entries(generator, words)
    before = {f"{stem}.txt": _lines(entries)}
    return Wanted(
        f"Write the number of lines with {words[0]} in {stem}.txt to {out}.",
        before,
        {**before, out: f"{_with(entries, words[0])}\n"},
        (f"grep -c {words[0]} {stem}.txt > {out}",),
    )


def look_up(generator: random.Random, stem: str) -> Wanted:
    words, out = generator.sample(WORDS, 3), f"{generator.choice(OUTPUTS)}.txt"
    entries = _entries(generator, words)
    before = {f"{stem}.txt": _lines(entries), "word.txt": f"{words[0]}\n"}
    return Wanted(
        f"Read word.txt. Write the number of lines with that word in {stem}.txt to {out}.",
        before,
        {**before, out: f"{_with(entries, words[0])}\n"},
        ("cat word.txt", f"grep -c {words[0]} {stem}.txt > {out}"),
    )


def rename(generator: random.Random, stem: str) -> Wanted:
    content, new = _lines(_entries(generator, list(WORDS))), generator.choice([name for name in STEMS if name != stem])
    before, after = {f"{stem}.txt": content}, {f"{new}.txt": content}
    return Wanted(f"Rename {stem}.txt to {new}.txt.", before, after, (f"mv {stem}.txt {new}.txt",))


def move(generator: random.Random, stem: str) -> Wanted:
    suffix, kept = generator.sample(("log", "csv", "bak", "txt"), 2)
    contents = {name: f"{generator.choice(WORDS)}\n" for name in generator.sample(WORDS, 4)}
    moved = dict(list(contents.items())[:3])
    rest = {f"{name}.{kept}": text for name, text in contents.items() if name not in moved}
    return Wanted(
        f"Make the folder {stem} and move all .{suffix} files to it.",
        {**{f"{name}.{suffix}": text for name, text in moved.items()}, **rest},
        {**{f"{stem}/{name}.{suffix}": text for name, text in moved.items()}, **rest},
        (f"mkdir {stem} && mv *.{suffix} {stem}",),
    )


def configure(generator: random.Random, stem: str) -> Wanted:
    keys = generator.sample(KEYS, 3)
    values = {key: generator.randint(10, 99) for key in keys}
    key, value = keys[generator.randrange(3)], generator.randint(100, 999)
    return Wanted(
        f"Set {key} to {value} in {stem}.conf.",
        {f"{stem}.conf": _lines([f"{name}={number}" for name, number in values.items()])},
        {f"{stem}.conf": _lines([f"{name}={number}" for name, number in {**values, key: value}.items()])},
        (f"sed -i 's/^{key}=.*/{key}={value}/' {stem}.conf",),
    )


def fix(generator: random.Random, stem: str) -> Wanted:
    wrong, right = generator.choice(TYPOS)
    first, last = generator.sample(WORDS, 2)
    script = f"#!/bin/sh\necho {first}\necho {wrong}\necho {last}\n"
    return Wanted(
        f"{stem}.sh prints {wrong} instead of {right}. Fix it.",
        {f"{stem}.sh": script},
        {f"{stem}.sh": script.replace(wrong, right)},
        (f"sed -i 's/{wrong}/{right}/' {stem}.sh",),
    )


def largest(generator: random.Random, stem: str) -> Wanted:
    # Sorted as texts, the largest number is not the last: 95 comes after 412.
    numbers = [*generator.sample(range(100, 900), 5), *generator.sample(range(90, 100), 3)]
    generator.shuffle(numbers)
    out, before = f"{generator.choice(OUTPUTS)}.txt", {f"{stem}.txt": _lines(list(map(str, numbers)))}
    return Wanted(
        f"Write the largest number in {stem}.txt to {out}.",
        before,
        {**before, out: f"{max(numbers)}\n"},
        (f"sort -n {stem}.txt | tail -1 > {out}",),
    )


def _end_of(generator: random.Random, stem: str, side: str) -> Wanted:
    entries, n, out = _entries(generator, list(WORDS)), generator.randint(2, 9), f"{generator.choice(OUTPUTS)}.txt"
    before = {f"{stem}.txt": _lines(entries)}
    wanted, program = (entries[:n], "head") if side == "first" else (entries[-n:], "tail")
    return Wanted(
        f"Write the {side} {n} lines of {stem}.txt to {out}.",
        before,
        {**before, out: _lines(wanted)},
        (f"{program} -{n} {stem}.txt > {out}",),
    )


def first(generator: random.Random, stem: str) -> Wanted:
    return _end_of(generator, stem, "first")


def order(generator: random.Random, stem: str) -> Wanted:
    entries, out = generator.sample(WORDS, 8), f"{generator.choice(OUTPUTS)}.txt"
    before = {f"{stem}.txt": _lines(entries)}
    return Wanted(
        f"Sort the lines of {stem}.txt and write them to {out}.",
        before,
        {**before, out: _lines(sorted(entries))},
        (f"sort {stem}.txt > {out}",),
    )


def drop(generator: random.Random, stem: str) -> Wanted:
    words = generator.sample(WORDS, 3)
    entries = [*_entries(generator, words), f"{words[0]} 7", f"{words[1]} 7"]
    return Wanted(
        f"Delete the lines with {words[0]} from {stem}.txt.",
        {f"{stem}.txt": _lines(entries)},
        {f"{stem}.txt": _lines([entry for entry in entries if words[0] not in entry])},
        (f"sed -i '/{words[0]}/d' {stem}.txt",),
    )


def column(generator: random.Random, stem: str) -> Wanted:
    rows = [[*generator.sample(WORDS, 2), str(generator.randint(1, 99))] for _ in range(6)]
    n, out = generator.randint(1, 3), f"{generator.choice(OUTPUTS)}.txt"
    before = {f"{stem}.csv": _lines([",".join(row) for row in rows])}
    return Wanted(
        f"Write column {n} of {stem}.csv to {out}.",
        before,
        {**before, out: _lines([row[n - 1] for row in rows])},
        (f"cut -d, -f{n} {stem}.csv > {out}",),
    )


def last(generator: random.Random, stem: str) -> Wanted:
    return _end_of(generator, stem, "last")


def join(generator: random.Random, stem: str) -> Wanted:
    other, out = generator.choice([name for name in STEMS if name != stem]), f"{generator.choice(OUTPUTS)}.txt"
    texts = [_lines(_entries(generator, list(WORDS))) for _ in range(2)]
    before = {f"{stem}.txt": texts[0], f"{other}.txt": texts[1]}
    return Wanted(
        f"Join {stem}.txt and {other}.txt and write them to {out}.",
        before,
        {**before, out: "".join(texts)},
        (f"cat {stem}.txt {other}.txt > {out}",),
    )


Kind = Callable[[random.Random, str], Wanted]
KINDS: Mapping[str, Kind] = {
    kind.__name__: kind for kind in (count, look_up, rename, move, configure, fix, largest, first, order, drop, column)
}
"""Kinds of training and of the held-out tasks."""
UNSEEN: Mapping[str, Kind] = {kind.__name__: kind for kind in (last, join)}
"""Kinds of the probe only."""

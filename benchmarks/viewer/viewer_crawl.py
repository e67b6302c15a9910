"""Every page of `trainspan view` that links lead to, on a state folder of one's own: time, bytes and errors by kind of page.

    TRAINSPAN_HOME=.trainspan python -m benchmarks viewer_crawl

Pages are asked for once, in the order in which links lead to them, at most `_MOST_OF_KIND` of each kind. The state folder is
only read.
"""

import html
import json
import re
from collections import Counter, deque
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from benchmarks.support.viewer_process import Asked, collector, viewer
from trainspan_schemas.home import home
from trainspan_schemas.store.roles import make_home_token_file

__all__ = ["measure"]

_MOST_OF_KIND: Final = 25
_LINK: Final = re.compile(r'href="(/[^"]*)"')
_WORDS: Final = frozenset({"runs", "datasets", "groups", "rollouts", "compare", "records", "calls", "group", "spans"})


def measure() -> dict[str, Any]:
    """A line for each kind of page, and what is beyond the limits."""
    place = home()
    make_home_token_file()
    waiting, seen, found = deque(["/"]), {"/"}, dict[str, list[tuple[str, Asked]]]()
    failed: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    with collector(place / "spans.duckdb") as pid, viewer(place, place / "spans.duckdb", pid) as served:
        while waiting:
            path = waiting.popleft()
            kind = _kind(path)
            if len(found.get(kind, [])) >= _MOST_OF_KIND:
                skipped[kind] += 1
                continue
            try:
                asked = served.ask(path)
            except RuntimeError as error:
                failed[path] = str(error)[:300]
                continue
            found.setdefault(kind, []).append((path, asked))
            for link in map(html.unescape, _LINK.findall(asked.body.decode())):
                address = link.partition("#")[0]
                if address not in seen and not address.startswith("/static/"):
                    seen.add(address)
                    waiting.append(address)
        peaks = served.peaks_mib()
    return {
        "state": Path(place).name,
        **{kind: _line([asked for _, asked in pages], skipped[kind]) for kind, pages in sorted(found.items())},
        "over_300_ms": {path: round(one.ms) for pages in found.values() for path, one in pages if one.ms > 300},
        "over_1_mb": {path: one.n_bytes for pages in found.values() for path, one in pages if one.n_bytes > 1_000_000},
        "failed": failed,
        **peaks,
    }


def _kind(path: str) -> str:
    """The address without names, with the names of its parameters and the values that choose a view."""
    parts = urlsplit(path)
    chosen = [f"{name}={value}" if name == "view" else name for name, value in parse_qsl(parts.query)]
    names = parts.path.strip("/").split("/")
    shape = "/" + "/".join(name if place == 0 or name in _WORDS else "NAME" for place, name in enumerate(names))
    return f"{shape}?{'&'.join(sorted(set(chosen) - {'dataset', 'attempt'}))}".rstrip("?")


def _line(pages: list[Asked], skipped: int) -> dict[str, Any]:
    return {
        "pages": len(pages),
        "not_asked_for": skipped,
        "first_answer_ms_max": round(max(one.ms for one in pages)),
        "whole_ms_max": round(max(one.whole_ms for one in pages)),
        "kb_max": round(max(one.n_bytes for one in pages) / 1000),
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))

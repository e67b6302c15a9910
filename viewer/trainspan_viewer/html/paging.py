"""Links between the parts of a list that is too long for one page."""

from collections.abc import Callable

from trainspan_viewer.html.elements import Element, element, link
from trainspan_viewer.html.formats import count

__all__ = ["paging"]


def paging(
    address: Callable[..., str], start: int, size: int, total: int, what: str, name: str = "from"
) -> Element | None:
    """Links to the neighboring parts of a list by the parameter `name`; None if it is on one page."""
    if total <= size and not start:
        return None
    last = min(start + size, total)
    return element(
        "p",
        link(address(**{name: max(0, start - size)}), "← earlier in the list", rel="prev") if start else None,
        element("span", f"{start + 1} to {last} of {count(total)} {what}"),
        link(address(**{name: start + size}), "further →", rel="next") if last < total else None,
        class_="pages",
    )

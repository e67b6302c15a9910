"""The page of a rollout's raw spans."""

from typing import Final

from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, isolated, link, sql_command
from trainspan_viewer.html.formats import count, seconds
from trainspan_viewer.pages.rollout.texts import pre
from trainspan_viewer.queries.rollout.raw_spans import PAGE, RawSpan, SpansModel

__all__ = ["render_spans"]

_MOST_LINKS: Final = 20


def render_spans(model: SpansModel) -> Page:
    end = model.start + len(model.spans)
    pages = element(
        "p",
        link(model.params.link(start=max(model.start - PAGE, 0) or None), "earlier") if model.start else None,
        f"spans {count(model.start + 1)} to {count(end)} of {count(model.total)}" if model.spans else "no spans here",
        "indented by the ancestors on this page" if model.is_part and model.spans else None,
        link(model.params.link(start=end), "later") if end < model.total else None,
        class_="pages",
    )
    others: list[Child] = [
        link(model.params.link(attempt=attempt, start=None), f"attempt {attempt}")
        for attempt in model.attempts
        if attempt != model.attempt
    ]
    which = element(
        "p", f"Attempt {model.attempt}. ", *(["Others: ", *_listed(others)] if others else []), class_="note"
    )
    body: list[Child] = [
        which,
        _others(model),
        pages,
        *(_span(span) for span in model.spans),
        pages if len(model.spans) > 5 else None,
    ]
    crumbs = [(f"rollout {model.rollout_id[:12]}", model.above)]
    return Page(f"Spans of rollout {model.rollout_id}", body, section="datasets", crumbs=crumbs)


def _others(model: SpansModel) -> Element | None:
    """What else is in the traces: spans that name no rollout are of their trace's only attempt, if it has only one."""
    if model.n_others == 0:
        return None
    if model.n_others is None:
        text = "Spans of its traces that are of another attempt or rollout, or of none, are not shown."
        return element("p", text, class_="note")
    is_single = model.n_others == 1
    text = f"{count(model.n_others)} more {'span of its traces is' if is_single else 'spans of its traces are'} "
    traces = ", ".join(f"'{trace}'" for trace in model.shared[:_MOST_LINKS])
    columns = "start_ns, name, service_name, trace_id, span_id, parent_span_id, attributes"
    sql = f"SELECT {columns} FROM spans WHERE trace_id IN ({traces}) ORDER BY start_ns"
    note = element("p", f"{text}of another attempt or rollout, or of none.", class_="note")
    return element("div", note, sql_command(sql, "all spans of these traces"))


def _listed(links: list[Child]) -> list[Child]:
    return [part for address in links[:_MOST_LINKS] for part in (address, " ")]


def _span(span: RawSpan) -> Element:
    times = f" · {seconds(span.seconds)} from {span.start_s:.3f} s · "
    ids = f" · trace {span.trace_id} · span {span.span_id}"
    parent = f" · parent {span.parent_span_id}" if span.parent_span_id else ""
    return element(
        "details",
        element(
            "summary",
            element("b", isolated(span.name)),
            " failed" if span.failed else "",
            times,
            isolated(span.service or "no service"),
            f"{ids}{parent}",
        ),
        pre(span.attributes, "env"),
        class_=f"span d{min(span.depth, 8)}",
        id=f"span-{span.span_id}",
    )

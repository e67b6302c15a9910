"""A dataset: groups as rows with their rollouts' rewards as dots, drops by reason, filters, quality, and differences."""

from typing import Any
from urllib.parse import quote

from trainspan_viewer.html.charts import dots
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, link, listed, table
from trainspan_viewer.html.formats import count, number, share
from trainspan_viewer.html.paging import paging
from trainspan_viewer.pages.difference import difference_body
from trainspan_viewer.pages.quality import quality_body
from trainspan_viewer.queries.addresses import dataset_address, rollout_address
from trainspan_viewer.queries.datasets.dataset import DatasetModel
from trainspan_viewer.queries.datasets.listing import DatasetRow, DatasetsModel
from trainspan_viewer.queries.datasets.members import DatasetMember, Group
from trainspan_viewer.queries.requests.explain_request import field_text

__all__ = ["render_dataset", "render_datasets"]

_STATUSES = ("ok", "agent_error", "context_overflow", "timeout", "cancelled", "infra_error", "judge_error", "diverged")


def render_datasets(model: DatasetsModel) -> Page:
    head = (
        "dataset",
        "run",
        "rows",
        "rollouts kept / seen",
        "groups kept / seen",
        "mean reward",
        "coverage",
        "dropped",
    )
    rows = [_dataset_row(row) for row in model.datasets]
    more = model.n_datasets - len(model.datasets)
    body: list[Child] = [
        table(head, rows, text=frozenset({0, 1, 7}), caption="datasets, newest first")
        if rows
        else element("p", "No datasets yet: `trainspan dataset` builds one.", class_="note"),
        element("p", f"{more} older datasets are not listed.", class_="note") if more > 0 else None,
    ]
    live = model.params.link() if model.is_live else None
    return Page("Datasets", [element("div", *body, id="live")], section="datasets", live=live)


def _dataset_row(row: DatasetRow) -> list[Child]:
    folder, run = row.location.path.name, row.location.run_id
    if row.error:
        return [folder, run or "–", *("–",) * 5, element("span", row.error, class_="bad")]
    manifest = row.manifest
    dropped = sorted(manifest["dropped"].items(), key=lambda item: -item[1])
    return [
        link(dataset_address(row.location.name), folder),
        link(f"/runs/{run}", run) if run else "–",
        count(manifest["rows"]),
        f"{count(manifest['rollouts'])} / {count(manifest['rollouts_seen'])}",
        f"{count(manifest['groups'])} / {count(manifest['groups_seen'])}",
        number((manifest["rewards"] or {}).get("mean")),
        share(manifest["coverage"]),
        ", ".join(f"{name} {calls}" for name, calls in dropped[:4]) or "–",
    ]


def render_dataset(model: DatasetModel) -> Page:
    run = model.location.run_id
    crumbs = [("runs", "/"), (run, f"/runs/{run}")] if run else [("datasets", "/datasets")]
    title = f"Dataset {model.location.path.name}"
    tabs = element(
        "nav",
        *(
            link(
                model.params.link(view=view, **{"from": None}),
                view,
                aria_current="page" if view == model.view else None,
            )
            for view in model.views
        ),
        class_="tabs",
        aria_label="views of the dataset",
    )
    return Page(title, [tabs, *_view(model)], section="datasets", crumbs=crumbs)


def _view(model: DatasetModel) -> list[Child]:
    if model.view == "quality":
        to_rollouts = {"view": "rollouts", "from": None}
        return quality_body(model.manifest, lambda reason: model.params.link(reason=reason, **to_rollouts))
    if model.view == "diff":
        return _diff(model)
    kind = "groups" if model.view == "groups" else "rollouts"
    listed = _groups(model) if model.view == "groups" else _rollouts(model)
    return [
        _form(model),
        *(element("p", note, class_="warn") for note in model.notes),
        listed if model.part.total else element("p", f"No {kind} have all of this.", class_="note"),
        paging(model.params.link, *model.part, kind),
    ]


def _form(model: DatasetModel) -> Element:
    filters = model.filters
    return element(
        "form",
        element("input", type="hidden", name="view", value=model.view),
        _field("search in ids and answers", "text", filters.text, "search"),
        _field("reward from", "least_reward", filters.least_reward),
        _field("to", "most_reward", filters.most_reward),
        _select("outcome", "reason", ["kept", *model.manifest["dropped"]], filters.reason),
        _select("status", "status", _STATUSES, filters.status),
        _select("agent", "agent", model.agents, filters.agent),
        _select("kind of call", "kind", model.kinds, filters.kind),
        _select("finished by", "finish", model.finishes, filters.finish),
        _field("trained tokens from", "least_tokens", filters.least_tokens),
        _field("to", "most_tokens", filters.most_tokens),
        _select("sort by", "sort", model.sorts, model.sort, any_=False),
        element("button", "show", type="submit"),
        link(f"{model.params.address}?view={model.view}", "clear"),
        method="get",
        class_="filters",
    )


def _field(label: str, name: str, value: str | float | None, kind: str = "number") -> Element:
    step = "any" if kind == "number" else None
    return element("label", label, element("input", type=kind, name=name, value=field_text(value), step=step))


def _select(label: str, name: str, choices: Any, chosen: str, *, any_: bool = True) -> Element:
    options = [element("option", "any", value="", selected=not chosen)] if any_ else []
    choices = [*choices, *([chosen] if chosen and chosen not in choices else [])]
    options += [element("option", choice, value=choice, selected=choice == chosen) for choice in choices]
    return element("label", label, element("select", *options, name=name))


def _groups(model: DatasetModel) -> Element:
    low, high = model.reward_range
    head: list[Child] = ["task", "rewards", "n", "mean", "spread", "calls kept", "outcome"]
    rows = [_group_row(model, group) for group in model.groups]
    caption = f"groups; a dot is a rollout, from reward {number(low)} to {number(high)}"
    return table(head, rows, text=frozenset({0, 1, 6}), caption=caption)


def _group_row(model: DatasetModel, group: Group) -> list[Child]:
    name = group.task_id or group.group_id or "no task"
    dataset = model.location.name
    if group.group_id:
        address = f"/groups/{quote(dataset, safe=':')}/{quote(group.group_id, safe='')}"
    else:
        address = _rollout_address(dataset, group.members[0])
    marks = [
        (
            member.reward,
            _rollout_address(dataset, member),
            f"reward {number(member.reward)}, rollout {member.rollout_id[:8]}, {member.reason or f'{member.kept} calls kept'}",
            member.kept > 0,
        )
        for member in group.members
        if member.reward is not None
    ]
    n_more = group.n - len(group.members)
    rewards = dots(marks, model.reward_range, f"rewards of {name}") if marks else "no reward"
    return [
        link(address, name),
        element("span", rewards, f" and {count(n_more)} more") if n_more > 0 else rewards,
        group.n,
        number(group.mean),
        number(group.spread),
        count(group.kept),
        ", ".join(group.reasons) or "kept",
    ]


def _rollouts(model: DatasetModel) -> Element:
    head = ("rollout", "task", "reward", "calls", "kept", "trained tokens", "finished by", "agents", "dropped as")
    rows: list[list[Child]] = [
        [
            link(_rollout_address(model.location.name, member), member.rollout_id[:16]),
            member.task_id or "–",
            number(member.reward),
            member.calls,
            member.kept,
            count(member.tokens),
            element("span", *listed(member.finish)) if member.finish else "–",
            element("span", *listed(member.agents)) if member.agents else "–",
            member.reason or ", ".join(f"{name} {count(calls)}" for name, calls in member.dropped.items()) or "–",
        ]
        for member in model.rollouts
    ]
    return table(head, rows, text=frozenset({0, 1, 6, 7, 8}), caption="rollouts")


def _diff(model: DatasetModel) -> list[Child]:
    form = element(
        "form",
        element("input", type="hidden", name="view", value="diff"),
        _select("compare with", "other", model.others, model.other, any_=False),
        element("button", "compare", type="submit"),
        method="get",
        class_="filters",
    )
    if not model.others:
        return [element("p", "There is no other dataset.", class_="note")]
    if model.difference is None:
        return [form]
    return [form, *difference_body(model.difference, model.location.name, model.other)]


def _rollout_address(dataset: str, member: DatasetMember) -> str:
    return rollout_address(member.rollout_id, dataset=dataset, attempt=member.attempt)

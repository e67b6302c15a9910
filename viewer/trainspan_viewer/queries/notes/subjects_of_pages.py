"""What the notes on a page are about, from the model of the page."""

from trainspan_viewer.queries.datasets.dataset import DatasetModel
from trainspan_viewer.queries.notes.subject import Subject
from trainspan_viewer.queries.rollout.group import GroupModel, LargeGroup
from trainspan_viewer.queries.rollout.rollout import RolloutModel
from trainspan_viewer.queries.rollout.tokens import TokensModel
from trainspan_viewer.queries.run import RunModel

__all__ = ["call_subject", "dataset_subject", "group_subject", "rollout_subject", "run_subject"]


def run_subject(model: RunModel) -> Subject:
    return Subject("run", model.records.run_id)


def dataset_subject(model: DatasetModel) -> Subject:
    return Subject("dataset", model.location.name)


def group_subject(model: GroupModel | LargeGroup) -> Subject | None:
    """None if the rollouts are no group of a dataset, which has no page of its own, or is too large to be read."""
    if isinstance(model, LargeGroup):
        return None
    names = (rollout.credit.group_id for rollout in model.group.rollouts)
    name = model.params.path.get("group") or next((group_id for group_id in names if group_id is not None), None)
    return Subject("group", name, dataset=model.dataset) if name and model.dataset else None


def rollout_subject(model: RolloutModel) -> Subject:
    account = model.account
    return Subject("rollout", account.rollout_id, account.attempt, dataset=model.links.dataset)


def call_subject(model: TokensModel) -> Subject:
    account = model.account
    return Subject("call", account.rollout_id, account.attempt, model.call.index, model.links.dataset)

"""Addresses of the pages about one rollout and about one dataset."""

from urllib.parse import quote

from trainspan_viewer.queries.params import Params

__all__ = ["dataset_address", "rollout_address"]


def rollout_address(rollout_id: str, below: str = "", /, **query: str | float | None) -> str:
    """The page of a rollout, or one `below` it (`/calls/3`); values of the query that are None are left out."""
    return Params(f"/rollouts/{quote(rollout_id, safe='')}{below}", {}, {}).link(**query)


def dataset_address(name: str) -> str:
    """The page of a dataset, by its name in addresses."""
    return f"/datasets/{quote(name, safe=':')}"

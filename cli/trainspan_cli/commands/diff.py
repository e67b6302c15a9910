"""`trainspan diff`."""

import json
from typing import Annotated

import typer

from trainspan_cli.settings import Format, FormatOption


def diff(
    dataset_a: Annotated[
        str, typer.Argument(help="Folder or URL of a dataset, such as .trainspan/dataset/round-0003.")
    ],
    dataset_b: Annotated[str, typer.Argument(help="Folder or URL of another dataset.")],
    format: FormatOption = Format.TABLE,
) -> int:
    """Show the differences between two datasets: settings, rollouts, rows, rewards, advantages.

    Exit code as for diff: 0 if they are equal, 1 if they differ, 2 if one of them cannot be read.

    Example: trainspan diff .trainspan/dataset/round-0003 /tmp/rloo/round-0003
    """
    from trainspan_cli.views.dataset_diff import print_difference
    from trainspan_processing.dataset.diff import compare_datasets
    from trainspan_processing.dataset.mirror import local_dataset
    from trainspan_processing.dataset.published import open_published
    from trainspan_schemas.errors import DatasetError, StorageError, UsageError

    try:
        a, b = (open_published(local_dataset(location)) for location in (dataset_a, dataset_b))
        difference = compare_datasets(a, b)
    except (DatasetError, StorageError) as error:
        raise UsageError(str(error)) from error
    if format == "json":
        print(json.dumps(difference.record()))
    else:
        print_difference(difference, dataset_a, dataset_b)
    return 0 if difference.is_empty else 1

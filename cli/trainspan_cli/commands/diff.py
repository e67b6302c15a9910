"""`trainspan diff`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainspan_cli.settings import FormatOption


def diff(
    dataset_a: Annotated[Path, typer.Argument(help="Folder of a dataset, such as .trainspan/dataset/round-0003.")],
    dataset_b: Annotated[Path, typer.Argument(help="Folder of another dataset.")],
    format: FormatOption = "table",
) -> int:
    """Show the differences between two datasets: settings, rollouts, rows, rewards, advantages.

    Exit code as for diff: 0 if they are equal, 1 if they differ, 2 if one of them cannot be read.

    Example: trainspan diff .trainspan/dataset/round-0003 /tmp/rloo/round-0003
    """
    from trainspan_cli.views.dataset_diff import print_difference
    from trainspan_processing.dataset.diff import compare_datasets
    from trainspan_processing.dataset.published import open_published
    from trainspan_schemas.errors import DatasetError, UsageError

    try:
        difference = compare_datasets(open_published(dataset_a), open_published(dataset_b))
    except DatasetError as error:
        raise UsageError(str(error)) from error
    if format == "json":
        print(json.dumps(difference.record()))
    else:
        print_difference(difference, str(dataset_a), str(dataset_b))
    return 0 if difference.is_empty else 1

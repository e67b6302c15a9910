"""`trainspan train`: the trainer."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, Format, FormatOption, PolicyOption, settings
from trainspan_loop.addresses import check_policy_server
from trainspan_schemas.artifacts.dataset import manifest_path, round_of
from trainspan_schemas.command_events import Ready, TrainingProgress, event_line
from trainspan_schemas.config.load import override
from trainspan_schemas.config.policy_scope import Policy, scoped
from trainspan_schemas.errors import TrainingError
from trainspan_schemas.home import checkpoints_dir, datasets_dir, is_url, policy_dir

if TYPE_CHECKING:
    from trainspan_processing.dataset.mirror import Mirror
    from trainspan_training.rounds.result import RoundResult

__all__ = ["train"]

_SHOWN: Final = {("old", 0), (None, 0)}
"""Stage and step that are always shown, because they begin what may take minutes."""
_SHOWN_EVERY_S: Final = 10.0


@setting_options("train", "model", "checkpoints", "policy_url", "learning_rate", "keep_start", "report_to", "seed")
@setting_options("model", "memory_share", "device", place="of_model")
def train(
    *,
    dataset: Annotated[
        str | None,
        typer.Option(help="A dataset, or a folder of datasets; also a URL [default: $TRAINSPAN_HOME/dataset]."),
    ] = None,
    policy: PolicyOption = None,
    given: Given,
    of_model: Given,
    follow: Annotated[bool, typer.Option("--follow", help="Keep training each dataset that appears.")] = False,
    rounds: Annotated[int | None, typer.Option(help="With --follow: stop after this number of datasets.")] = None,
    format: FormatOption = Format.TABLE,
    config: ConfigOption = None,
) -> None:
    """Train on the newest unused dataset, write a checkpoint and swap it into the policy server.

    Training starts from the newest checkpoint, or from the model if there is none.
    With --policy, datasets and checkpoints are those of the policy's folder under --dataset and --checkpoints.

    Example: trainspan train --model Qwen/Qwen3-0.6B --policy-url http://127.0.0.1:8000
    """
    scope = scoped(settings(config), policy)
    chosen = override(scope.train, **given, **of_model)
    if chosen.policy_url != "none":
        for url in chosen.policy_url.split(","):
            check_policy_server(scope, url.strip())
    datasets, mirror = _datasets(dataset, scope.dataset.out, policy)

    from trainspan_training.session import TrainJob
    from trainspan_training.session import train as run

    checkpoints = policy_dir(checkpoints_dir(chosen.checkpoints), policy)
    job = TrainJob(chosen, datasets, checkpoints, follow, rounds, policy, mirror)
    output = _Output(as_json=format == "json", follow=follow)
    run(job, output.ready, output.result, output.progress)
    if not follow and output.results and (failure := output.results[0].failure):
        raise TrainingError(failure)


class _Output:
    """Prints what the trainer does, as text or as JSON lines."""

    def __init__(self, *, as_json: bool, follow: bool) -> None:
        self._as_json = as_json
        self._follow = follow
        self._shown_at = time.monotonic()
        self.results: list[RoundResult] = []

    def ready(self, device: str, dtype: str) -> None:
        if self._as_json:
            print(event_line(Ready(device=device, dtype=dtype)), flush=True)
        else:
            print(f"training on {device} in {dtype}{': waiting for datasets' if self._follow else ''}", flush=True)

    def result(self, result: "RoundResult") -> None:
        self.results.append(result)
        print(event_line(result.event()) if self._as_json else result.line(), flush=True)

    def progress(self, progress: TrainingProgress) -> None:
        is_late = progress.step < progress.steps and time.monotonic() - self._shown_at > _SHOWN_EVERY_S
        if self._as_json:
            print(event_line(progress), flush=True)
        elif (progress.stage, progress.step) in _SHOWN or is_late:
            self._shown_at = time.monotonic()
            print(f"round {progress.round}: {progress}", flush=True)


def _datasets(given: str | None, setting: str | None, policy: Policy) -> "tuple[Path, Mirror | None]":
    """A dataset that is named itself, or the policy's folder of datasets; of a URL, the folder with their manifests."""
    location = given or setting
    if location is not None and is_url(location):
        from trainspan_processing.dataset.mirror import Mirror, known_dataset

        if round_of(location.rstrip("/").rpartition("/")[2]) is not None:
            mirror, known = known_dataset(location)
            return known, mirror
        mirror = Mirror.of(f"{location.rstrip('/')}/{policy}" if policy else location)
        mirror.refresh()
        return mirror.known, mirror
    if given is not None and manifest_path(Path(given)).exists():
        return Path(given), None
    return policy_dir(datasets_dir(location), policy), None

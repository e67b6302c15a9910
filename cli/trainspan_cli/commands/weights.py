"""`trainspan weights`."""

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, FormatOption, settings


@setting_options("train", "checkpoints", "weights_host", "weights_port")
def weights(
    *,
    given: Given,
    config: ConfigOption = None,
    format_: FormatOption = "table",
) -> None:
    """Serve the trainer's checkpoints over HTTP to policy servers on other machines, until stopped.

    They copy a checkpoint by its hashes when they swap to it, and need the token in $TRAINSPAN_HOME/token.

    Example: trainspan weights --weights-host 10.0.0.1
    """

    from trainspan_schemas.command_events import Ready, event_line
    from trainspan_schemas.config.load import override
    from trainspan_schemas.errors import ProcessError
    from trainspan_schemas.home import checkpoints_dir, token
    from trainspan_training.checkpoints.file_server import serve_files

    chosen = override(settings(config).train, **given)
    root = checkpoints_dir(chosen.checkpoints)

    def announce(url: str) -> None:
        print(event_line(Ready(url)) if format_ == "json" else f"serving {root} at {url}", flush=True)

    try:
        serve_files(root, chosen.weights_host, chosen.weights_port, token(), announce)
    except OSError as error:
        where = f"{chosen.weights_host}:{chosen.weights_port}"
        raise ProcessError(f"cannot listen on {where}: {error.strerror or error}") from error

"""`trainspan view`."""

from typing import Annotated

import typer

from trainspan_cli.setting_options import Given, setting_options
from trainspan_cli.settings import ConfigOption, StoresOption, settings
from trainspan_loop.addresses import stores_of


@setting_options("view", "host", "port", "read_only")
def view(
    *,
    given: Given,
    store: StoresOption = None,
    run: Annotated[str | None, typer.Option(help="Begin with the page of this run; newest: the newest run.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the pages in a browser.")] = False,
    config: ConfigOption = None,
) -> None:
    """Show runs, datasets, groups and rollouts in a browser, live while a loop runs, and take people's labels.

    Example: trainspan view --open
    """
    from trainspan_cli.clients.label_sender import CollectorLabels
    from trainspan_schemas.config.load import override
    from trainspan_schemas.errors import UsageError
    from trainspan_schemas.home import datasets_dir, runs_dir
    from trainspan_viewer.queries.paths import NotFoundError, ViewerPaths
    from trainspan_viewer.queries.sources import Sources
    from trainspan_viewer.queries.store import StoreReader
    from trainspan_viewer.server.process import Listening, serve

    chosen = settings(config)
    paths = ViewerPaths(runs_dir(), datasets_dir(chosen.dataset.out))
    try:
        path = "/" if run is None else f"/runs/{paths.run_named(run).run_id}"
    except NotFoundError as error:
        raise UsageError(str(error)) from error

    def say(server: Listening) -> None:
        print(server.address(path), flush=True)
        if open_:
            import threading
            import webbrowser

            # Other users see a browser's command line, so the address in it opens the pages only once.
            address = server.address(path, once=True)
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    stores = stores_of(chosen, store)
    sources = Sources(paths, StoreReader(*stores), chosen)
    serve(override(chosen.view, **given), sources, CollectorLabels(chosen, stores), say)

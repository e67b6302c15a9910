"""`trainspan view` with one more page, `/slow/{ms}`, which takes as long as it says: python slow_view.py OPTION…"""

import sys
import time

from trainspan_cli import main
from trainspan_viewer.html.document import Page
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.sources import Sources
from trainspan_viewer.server import app
from trainspan_viewer.server.routes import ROUTES, View


def _sleep(_: Sources, params: Params) -> int:
    ms = params.integer("ms", 0)
    time.sleep(ms / 1000)
    return ms


app.ROUTES = (*ROUTES, View("/slow/{ms}", _sleep, lambda ms: Page(f"Slept {ms} ms", [])))  # type: ignore[misc]
if __name__ == "__main__":
    sys.exit(main.run(["view", *sys.argv[1:]]))

"""Takes the pictures of docs/view.md in a headless Chromium: those of its walk, or a run and a dataset.

    .venv/bin/trainspan view --host 127.0.0.1                        # with the run's state folder; prints ADDRESS
    .venv/bin/python tools/take_screenshots.py ADDRESS walk          # on the run of examples/view_walk/run.py
    .venv/bin/python tools/take_screenshots.py ADDRESS overview      # on any other run; that of `make demo` is in docs/

Pictures are PNG with 256 colors, so that they stay small.
"""

import io
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
WIDTH, COLORS = 1200, 256


def take(page: Any, name: str, height: int, heading: str = "") -> None:
    """The top of the page, or from a heading on, `height` pixels high."""
    page.set_viewport_size({"width": WIDTH, "height": height})
    if heading:
        page.get_by_role("heading", name=heading).evaluate("one => one.scrollIntoView()")
    page.mouse.move(0, 0)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    small = image.quantize(COLORS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small.save(DOCS / f"{name}.png", optimize=True)
    sys.stdout.write(f"{name}.png: {(DOCS / f'{name}.png').stat().st_size:,} bytes\n")


def overview(page: Any, address: str) -> None:
    """The newest run, and the dataset of its fourth round."""
    page.goto(address)
    page.locator("tbody td a[href^='/runs/']").first.click()
    take(page, "view-run", 1010)
    page.get_by_role("table", name="rounds, newest first").get_by_role("link", name="4", exact=True).click()
    take(page, "view-groups", 1010)


def walk(page: Any, address: str) -> None:
    """The pages of the walk, from the newest run on."""
    page.goto(address)
    home = f"{urlsplit(address).scheme}://{urlsplit(address).netloc}"
    page.locator("tbody td a[href^='/runs/']").first.click()
    take(page, "walk-run", 660)
    page.get_by_role("table", name="rounds, newest first").get_by_role("link").first.click()
    dataset = page.url
    page.goto(f"{dataset}?view=quality")
    take(page, "walk-dataset", 1000, "Calls and groups")
    page.goto(f"{dataset}?text=add-")
    groups = page.get_by_role("table", name="groups").locator("tbody tr td:first-child a")
    for href in [str(link.get_attribute("href")) for link in groups.all()]:
        page.goto(home + href)
        page.locator("table.siblings").first.wait_for()  # until then, the page may say that the store is being read
        if page.get_by_text("The judge may be wrong").count():
            break
    else:
        sys.exit("no group of the last round shows the judge's fault: run it again")
    take(page, "walk-group", 690)
    page.goto(f"{dataset}?view=rollouts&reason=overlong&sort=least+reward")
    page.get_by_role("table", name="rollouts").get_by_role("link").first.click()
    take(page, "walk-rollout", 400, "Conversation")


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = browser.new_context(color_scheme="light")
        context.set_default_timeout(100_000)
        {"walk": walk, "overview": overview}[sys.argv[2]](context.new_page(), sys.argv[1])
        browser.close()


if __name__ == "__main__":
    main()

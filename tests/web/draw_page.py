"""Draw docs/images/page.png: the page with the bundled model, for the README.

    python -m tests.web.draw_page [--output PATH]

It needs Playwright (`pip install '.[dev,web]'`) and Chromium.
"""

import argparse
from pathlib import Path

from tests.service.running import running
from tests.web.browsing import chromium, new_context, open_view

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "page.png"
NAME = "network"


def draw(path: Path) -> None:
    with running(model="bundled") as service, chromium() as browser, new_context(browser) as context:
        page = context.new_page()
        page.set_viewport_size({"width": 1280, "height": 860})
        open_view(page, str(service.client.base_url), NAME)
        page.screenshot(path=path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURE)
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()

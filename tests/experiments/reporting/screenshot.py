"""The picture of a report that the README shows: `python -m tests.experiments.reporting.screenshot RUN FILE.png`.

It needs a Chromium. 64 colours are enough for a report, and make the file a third as large.
"""

import argparse
from pathlib import Path

from PIL import Image

from tests.experiments.reporting.browser import Browser, installed

_WIDTH = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("file", type=Path, help="the PNG to write")
    parser.add_argument("--height", type=int, default=1100, help="pixels from the top of the report")
    asked = parser.parse_args()
    program = installed()
    if program is None:
        parser.error("no Chromium is installed")
    with Browser(program) as browser:
        browser.open(asked.run / "report.html", _WIDTH)
        browser.screenshot(asked.file, asked.height)
    with Image.open(asked.file) as picture:
        few = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few.save(asked.file, optimize=True)


if __name__ == "__main__":
    main()

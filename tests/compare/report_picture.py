"""The documentation's pictures of report.html, light and dark: make report-picture.

    python -m tests.compare.report_picture                  # of invented results
    python -m tests.compare.report_picture FOLDER           # of what ab --output FOLDER left

Writes docs/report.png and docs/report-dark.png, below 300 kB each.
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from quantbench.compare.figures.choices import Limits
from quantbench.compare.figures.recommendation import recommend
from quantbench.compare.figures.rows import best_of, rows
from quantbench.compare.output import html
from quantbench.compare.output.tables import remarks
from quantbench.compare.sampling.results import Results
from tests.compare.browser import chromium, prefer, resize
from tests.compare.example_results import example_results

WIDTH, HEIGHT = 1200, 1560  # pixels
MOST_BYTES = 300_000
PICTURES = {"light": "docs/report.png", "dark": "docs/report-dark.png"}


def main(folder: str | None = None) -> None:
    results = Results.load(Path(folder)) if folder else example_results()
    arm_rows = rows(results)
    if results.recommendation is None:
        results.recommendation = recommend(arm_rows, Limits(), best_of(results))
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        html.write(Path(scratch), results, arm_rows, remarks(results, arm_rows))
        resize(browser, WIDTH, HEIGHT)
        for scheme, path in PICTURES.items():
            prefer(browser, scheme)
            browser.get((Path(scratch) / html.FILE).as_uri())
            picture = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
            picture.convert("RGB").quantize(128).save(path, optimize=True)
            size = Path(path).stat().st_size
            print(f"{path}: {size / 1e3:.0f} kB")
            if size > MOST_BYTES:
                sys.exit(f"error: {path} is above {MOST_BYTES / 1e3:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])

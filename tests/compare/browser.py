"""Chromium without a window, by way of chromedriver."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--hide-scrollbars")  # fmt: skip


def programs() -> list[str] | None:
    """The browser's and its driver's path; None where one is missing."""
    paths = [path for name in ("chromium", "chromedriver") if (path := shutil.which(name))]
    return paths if len(paths) == 2 else None


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser that keeps what its console and its network say."""
    from selenium import webdriver

    browser, driver = programs() or ("", "")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    session = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield session
    finally:
        session.quit()


def resize(browser: Any, width: int, height: int = 900) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def prefer(browser: Any, scheme: str) -> None:
    """light or dark, as the system has it."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

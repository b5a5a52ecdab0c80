"""A headless Chromium for tests of the web page; they are skipped where it is not installed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

_SWITCHES = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--lang=en")


class Browser:
    """A browser window with short names for what the tests do."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str, *, fresh: bool = True) -> None:
        """Show a page and wait until its script has asked for the models; `fresh` forgets what was kept."""
        self.driver.get(url)
        if fresh:
            self.run("localStorage.clear(); sessionStorage.clear(); location.hash = ''")
            self.driver.get(url)
        self.until(lambda: self.one("#model").text != "…" or not self.one("#notice").get_property("hidden"))

    def one(self, selector: str) -> WebElement:
        """Return the element."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Return what the elements show."""
        return [each.text for each in self.driver.find_elements(By.CSS_SELECTOR, selector)]

    def type(self, text: str, *keys: str) -> None:
        """Type into the composer."""
        self.one("#input").send_keys(text, *keys)

    def say(self, text: str) -> None:
        """Send a message and wait until its answer is complete."""
        count = len(self.texts(".assistant"))
        self.type(text, Keys.ENTER)
        self.until(lambda: len(self.texts(".assistant:not(.live)")) > count)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def later(self, script: str, *arguments: Any) -> Any:
        """Run an asynchronous function's body in the page and return what it returns."""
        return self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1], given = [...arguments].slice(0, -1);"
            f"(async (...args) => {{ {script} }})(...given).then(done, (error) => done('failed: ' + error));",
            *arguments,
        )

    def until(self, condition: Callable[[], object], seconds: float = 5.0) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the page did not get there"
            time.sleep(0.02)

    def complaints(self) -> list[str]:
        """Return the errors that the page has logged since the last call, breaches of its policy too."""
        entries: list[dict[str, str]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


@contextmanager
def browsing() -> Iterator[Browser]:
    """Run a browser until the block ends."""
    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if None in programs:
        pytest.skip("needs the programs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = ChromeOptions()
    for switch in _SWITCHES:
        options.add_argument(switch)
    options.binary_location = str(programs[0])
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(str(programs[1])))
    try:
        driver.set_window_size(1200, 850)
        driver.set_script_timeout(10)
        yield Browser(driver)
    finally:
        driver.quit()

"""What several tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, browsing


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Return a browser, which takes seconds to start."""
    with browsing() as made:
        yield made

"""Tiny models that the tests share, and one thread for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tiny_models import tiny_model, write_folder

Sources = Callable[[str], Path]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Return a function from a kind of model to a float32 folder of it, which tests must not change."""

    @cache
    def folder(kind: str) -> Path:
        return write_folder(tmp_path_factory.mktemp("models") / kind, tiny_model(kind))

    return folder

"""Names that come from outside cannot become paths outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipfire.base.errors import ValidationError
from hipfire.base.safe_names import check_digest, check_file_name, check_name, name_fault

REFUSED = [
    "", " ", ".", "..", "../x", "a/../b", "/etc/passwd", "a/b", "a\\b", "..\\x", "C:", "c:model", "C:\\x",
    "nul", "NUL.gguf", "con", "Com1.txt", "lpt9", "x:nul", "a\0b", "a\nb", "\x1b[31m", "-rf", ".hidden",
    "end.", " pad", "a*b", "a?b", 'a"b', "a|b", "<a>", "x" * 241, "é" * 121, "a\udcffb",
]  # fmt: skip
ACCEPTED = [
    "smollm2:135m",
    "модель",
    "模型-7b",
    "🔥",
    "café",
    "Qwen3.5-0.8B.mq4",
    "a b",
    "console",
    "x" * 240,
]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="refused"):
        check_name(name)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    assert check_name(name) == name


def test_tag_separator_is_not_allowed_in_a_file_name() -> None:
    with pytest.raises(ValidationError, match="':'"):
        check_file_name("smollm2:135m")


@given(st.text(max_size=40))
def test_an_accepted_name_is_one_component_inside_its_folder(name: str) -> None:
    if name_fault(name) is None:
        joined = Path("/models") / name
        assert joined.parent == Path("/models")
        assert ".." not in joined.parts


@pytest.mark.parametrize(
    "text", ["", "..", "/etc/passwd", "A" * 64, "a" * 63, "a" * 65, "g" * 64, "a" * 63 + "\n"]
)
def test_bad_digests(text: str) -> None:
    with pytest.raises(ValidationError):
        check_digest(text)

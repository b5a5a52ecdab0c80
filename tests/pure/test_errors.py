"""Errors are one printable line, with numbers and hints."""

from __future__ import annotations

from pathlib import Path

import pytest

from hipfire.base import errors
from hipfire.base.errors import (
    ArtifactError,
    ContextLengthError,
    HipfireError,
    MemoryLimitError,
    ValidationError,
)


def test_a_line_holds_message_and_hint_and_no_break() -> None:
    assert ValidationError("two\nlines", hint="do\tthis").line() == "two lines; do this"
    assert str(ValidationError("plain")) == "plain"


def test_control_characters_from_hostile_names_do_not_reach_a_terminal() -> None:
    line = ArtifactError("bad", field="name \x1b[31mred\x07 \u202e").line()
    assert line.isprintable()
    assert "\\x1b[31m" in line
    # ordinary text of any script stays readable
    assert ValidationError("модель é 漢字 🎉").line() == "модель é 漢字 🎉"


def test_an_artifact_error_names_file_field_and_offset() -> None:
    error = ArtifactError("is too large", path=Path("m.hf4"), field="n_tensors", offset=12)
    assert error.line() == "m.hf4: n_tensors: at byte 12: is too large"
    assert (error.field, error.offset) == ("n_tensors", 12)


def test_limits_carry_both_numbers() -> None:
    assert "5000 tokens requested but the context holds 4096" in ContextLengthError(5000, 4096).line()
    error = MemoryLimitError(3 << 30, 1 << 30, what="this model")
    assert error.line() == "this model needs 3072 MiB but 1024 MiB are available"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ValidationError", "validation"),
        ("ContextLengthError", "context_length"),
        ("UnsupportedError", "unsupported"),
        ("ArtifactError", "artifact"),
        ("MemoryLimitError", "memory"),
        ("TransportError", "transport"),
        ("InternalError", "internal"),
    ],
)
def test_every_kind_has_its_own_class(name: str, kind: str) -> None:
    cls = getattr(errors, name)
    assert issubclass(cls, HipfireError)
    assert cls.kind == kind

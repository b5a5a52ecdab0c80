"""What clients are told of errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from hipfire.base.errors import (
    ArtifactError,
    ContextLengthError,
    HipfireError,
    InternalError,
    MemoryLimitError,
    TransportError,
    UnsupportedError,
    ValidationError,
)
from hipfire.engine.client import DaemonDiedError
from hipfire.server.errors import (
    FieldError,
    NotFoundError,
    OverloadedError,
    ReportedError,
    headers_of,
    openai_body,
    status_of,
)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ValidationError("x"), 400, "validation"),
        (UnsupportedError("x"), 400, "unsupported"),
        (ContextLengthError(9, 5), 400, "context_length_exceeded"),
        (NotFoundError("x", code="model_not_found"), 404, "model_not_found"),
        (ArtifactError("x"), 500, "artifact"),
        (InternalError("x"), 500, "internal"),
        (RuntimeError("x"), 500, "internal"),
        (HipfireError("x"), 500, "internal"),
        (MemoryLimitError(2, 1, what="x"), 503, "memory"),
        (TransportError("x"), 503, "transport"),
        (OverloadedError("x"), 503, "transient"),
        (DaemonDiedError("x"), 503, "transient"),
        (ReportedError("gpu", "x"), 500, "gpu"),
        (ReportedError("context_length", "x"), 400, "context_length_exceeded"),
    ],
)
def test_kind_decides_status_and_code(error: Exception, status: int, code: str) -> None:
    body = openai_body(error)["error"]
    assert (status_of(error), body["code"]) == (status, code)
    assert body["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert ("Retry-After" in headers_of(error)) is (status == 503)


def test_hint_and_field_are_told_in_one_line() -> None:
    body = openai_body(FieldError("tools[0].type", "bad\ntype", hint="use function"))["error"]
    assert body["param"] == "tools[0].type"
    assert "\n" not in body["message"]
    assert body["message"].endswith("use function")


def test_folders_of_this_machine_are_not_told(tmp_path: Path) -> None:
    file = tmp_path / "some-model.gguf"
    for error in (
        ArtifactError("is damaged", path=file, field="header", offset=3),
        ReportedError("internal", f"cannot read {file}: no such file"),
        MemoryLimitError(2**30, 1, what=f"loading '{file}'"),
    ):
        message = openai_body(error)["error"]["message"]
        assert str(tmp_path) not in message
        assert "some-model.gguf" in message
    # routes in advice are no paths, and what the client itself wrote is quoted as it is
    advice = UnsupportedError("no template", hint="use /v1/chat/completions or /api/chat")
    assert "/v1/chat/completions" in openai_body(advice)["error"]["message"]
    assert "/usr/bin/env" in openai_body(NotFoundError("no model '/usr/bin/env'"))["error"]["message"]


def test_inside_of_an_unexpected_error_is_not_told() -> None:
    assert "secret" not in openai_body(RuntimeError("secret"))["error"]["message"]

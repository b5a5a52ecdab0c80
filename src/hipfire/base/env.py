"""Where hipfire keeps its files, and how it reads environment variables.

This file knows names of variables and paths. It does not know configuration keys (config_keys.py) and it
creates nothing on disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from urllib.parse import urlsplit

from hipfire.base.errors import ValidationError

TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"0", "false", "no", "off"})


def parse_bool(text: str, *, what: str) -> bool:
    """Return the truth value that `text` spells; `what` names the variable or key in the error."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValidationError(f"{what}: {text!r} is not a truth value", hint="use true or false")


def get(name: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable's value; an unset, empty or blank variable is None."""
    value = env.get(name, "").strip()
    return value or None


def absolute(text: str, *, what: str) -> Path:
    """Return `text` as an absolute path with `~` expanded."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValidationError(
            f"{what}: the home folder in {text!r} cannot be found", hint="give an absolute path"
        ) from error


def home(env: Mapping[str, str] = os.environ) -> Path:
    """Return hipfire's root folder: HIPFIRE_HOME, or `.hipfire` in the user's home folder."""
    chosen = get("HIPFIRE_HOME", env)
    if chosen is not None:
        return absolute(chosen, what="HIPFIRE_HOME")
    try:
        return Path.home() / ".hipfire"
    except RuntimeError as error:
        raise ValidationError(
            "this user has no home folder", hint="set HIPFIRE_HOME to a folder for models and settings"
        ) from error


def models_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of installed models: HIPFIRE_MODELS_DIR, or `models` under the root."""
    chosen = get("HIPFIRE_MODELS_DIR", env)
    return home(env) / "models" if chosen is None else absolute(chosen, what="HIPFIRE_MODELS_DIR")


def templates_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of per-model chat templates (`<model file>.j2`)."""
    return home(env) / "templates"


def config_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the global settings file."""
    return home(env) / "config.toml"


def catalog_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the per-model file: HIPFIRE_MODELS_CATALOG_PATH, or `models.toml` under the root."""
    chosen = get("HIPFIRE_MODELS_CATALOG_PATH", env)
    return (
        home(env) / "models.toml" if chosen is None else absolute(chosen, what="HIPFIRE_MODELS_CATALOG_PATH")
    )


def server_record_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the record of the running server, `serve.pid` under the root."""
    return home(env) / "serve.pid"


def server_log_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the log of a server in the background, `serve.log` under the root."""
    return home(env) / "serve.log"


def daemon_lock_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the file that the running daemon holds a lock on, `daemon.pid` under the root."""
    return home(env) / "daemon.pid"


def chat_history_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the lines typed into `hipfire chat`, `chat_history` under the root."""
    return home(env) / "chat_history"


def registry_path(env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the registry file that replaces the bundled one (HIPFIRE_REGISTRY_FILE), or None."""
    chosen = get("HIPFIRE_REGISTRY_FILE", env)
    return None if chosen is None else absolute(chosen, what="HIPFIRE_REGISTRY_FILE")


def hf_token(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the Hugging Face token: HF_TOKEN, else HUGGING_FACE_HUB_TOKEN, else None."""
    return get("HF_TOKEN", env) or get("HUGGING_FACE_HUB_TOKEN", env)


def hf_endpoint(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the model hub's base address (HIPFIRE_HF_BASE, else HF_ENDPOINT), or None for the default.

    Raises ValidationError, which names the variable, for anything but an http or https address with a host.
    """
    for name in ("HIPFIRE_HF_BASE", "HF_ENDPOINT"):
        address = get(name, env)
        if address is not None:
            return _checked_address(address, name)
    return None


def pip_cert(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the file or folder of certificates that pip was told to trust (PIP_CERT), or None.

    Raises ValidationError if it is not there.
    """
    chosen = get("PIP_CERT", env)
    if chosen is None:
        return None
    path = absolute(chosen, what="PIP_CERT")
    if not path.exists():
        raise ValidationError(f"PIP_CERT: no certificates at {path}", hint="correct the variable or unset it")
    return str(path)


def _checked_address(address: str, name: str) -> str:
    try:
        parts = urlsplit(address)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        # a port that is no number, or a broken IPv6 address
        fits = False
    if not fits or any(char.isspace() for char in address):
        raise ValidationError(
            f"{name}: {address!r} is not an address", hint="use one such as https://host.example"
        )
    return address


def let_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make the threads of the matrix library sleep while they wait, unless the user has chosen otherwise.

    By default they spin. On a machine with other work that starves the thread they wait for: a conversion was
    seen to take more than ten times as long. This must run before torch is imported.
    """
    environment.setdefault("OMP_WAIT_POLICY", "passive")

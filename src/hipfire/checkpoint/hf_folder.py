"""The text files of a Hugging Face model folder: configs, tokenizer, chat templates.

Does not know tensors. Of two templates for one name the `.jinja` file wins over `tokenizer_config.json`, as
in current transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hipfire.base.errors import ArtifactError
from hipfire.base.types import TextAssets
from hipfire.checkpoint import chat_templates, jsontext
from hipfire.checkpoint.mapped import unreadable


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the folder's `config.json`.

    Raises:
        ArtifactError: it is missing, unreadable or no JSON object.
    """
    path = folder / "config.json"
    config = read_json(path)
    if config is None:
        raise ArtifactError(
            "config.json is missing",
            path=folder,
            hint="take it from the model's repository: without it the weights have no meaning",
        )
    return config


def read_text_assets(folder: Path, model_config: dict[str, Any]) -> TextAssets:
    """Return tokenizer, templates and generation defaults; files that are absent leave their field empty.

    `tokenizer_config` comes back with `chat_template` set to all templates found, so that it can be
    stored as one object.

    Raises:
        ArtifactError: one of the files is unreadable, not UTF-8, or has the wrong JSON type.
    """
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) or {}
    templates = chat_templates.from_config(config, path=config_path, field="tokenizer_config")
    single = _read(folder / "chat_template.jinja")
    if single is not None:
        templates[chat_templates.DEFAULT] = single
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        text = _read(path)
        if text is not None:
            templates[path.stem] = text
    return TextAssets(
        tokenizer_json=_read(folder / "tokenizer.json"),
        tokenizer_config=chat_templates.folded(config, templates),
        generation_config=read_json(folder / "generation_config.json") or {},
        model_config=model_config,
        chat_templates=templates,
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object file, or None if there is no such file.

    Raises:
        ArtifactError: the file is unreadable or no JSON object.
    """
    data = _read_bytes(path)
    return None if data is None else jsontext.parse_object(data, path=path, field="file", constants=True)


def _read(path: Path) -> str | None:
    data = _read_bytes(path)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise ArtifactError("text is not UTF-8", path=path, offset=error.start) from error


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error

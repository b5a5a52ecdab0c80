"""What clients are told of a model's file: read from real files, and read again when they change."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import ollama
import pytest
from server_kit import serving

from hipfire.base.errors import ArtifactError
from hipfire.server.model_facts import FactsReader

CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
TOOLS = CHAT + "{% if tools %}Answer with <tool_call>{...}</tool_call>{% endif %}<think>"


def write_model(path: Path, template: str) -> Path:
    """Write a GGUF file of a million parameters, which are never read."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.zeros((1000, 1000), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_facts_come_from_the_header(tmp_path: Path) -> None:
    facts = FactsReader().read(write_model(tmp_path / "m.gguf", TOOLS))
    assert (facts.architecture, facts.parameters, facts.context) == ("llama", 1_000_000, 8192)
    assert (facts.template, facts.tools, facts.thinking) == (TOOLS, True, True)


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    reader, path = FactsReader(), tmp_path / "m.gguf"
    assert reader.read(write_model(path, TOOLS)).tools
    write_model(path, CHAT)
    os.utime(path, ns=(1, 1))
    again = reader.read(path)
    assert (again.tools, again.thinking) == (False, False)
    path.write_bytes(b"broken")
    with pytest.raises(ArtifactError):
        reader.read(path)


def test_show_tells_what_a_model_can_do() -> None:
    with serving() as live:
        (folder,) = {entry.path.parent for entry in live.service.models()}
        write_model(folder / "chatty.gguf", TOOLS)
        shown = ollama.Client(host=live.url).show("chatty")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template == TOOLS
    assert shown.details is not None
    assert (shown.details.family, shown.details.parameter_size) == ("llama", "1M")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 8192

"""What a model's file says about it, for clients that ask: size, context, template, and what it can do.

Reads headers only, and remembers them until the file changes. This file loads no weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipfire.checkpoint.source import open_checkpoint
from hipfire.text.reply_format import reply_format


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`context` is the tokens that the model was trained for, 0 if unknown; `template` the Jinja source."""

    architecture: str
    parameters: int
    context: int
    template: str
    tools: bool
    thinking: bool


class FactsReader:
    """Reads facts about model files; may be called from several threads."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, ModelFacts]] = {}

    def read(self, path: Path) -> ModelFacts:
        """Return the facts about the model at `path`. Raises ArtifactError or UnsupportedError."""
        changed = path.stat().st_mtime_ns
        known = self._known.get(path)
        if known is None or known[0] != changed:
            known = self._known[path] = (changed, _read(path))
        return known[1]


def _read(path: Path) -> ModelFacts:
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.model_config
        templates = checkpoint.text_assets().chat_templates
        parameters = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    architecture = str(config.get("general.architecture") or config.get("model_type") or "")
    # every template counts: a model may have one of its own for tools
    markup = reply_format("\n".join(templates.values()), lambda _: True)
    return ModelFacts(
        architecture=architecture,
        parameters=parameters,
        context=_context(config, architecture),
        template=templates.get("default", ""),
        tools=markup.tools is not None,
        thinking=markup.thinking != "none",
    )


def _context(config: Mapping[str, Any], architecture: str) -> int:
    inner = config.get("text_config")
    places = [config.get(f"{architecture}.context_length"), config.get("max_position_embeddings")]
    if isinstance(inner, Mapping):
        places.append(inner.get("max_position_embeddings"))
    return next((value for value in places if isinstance(value, int)), 0)

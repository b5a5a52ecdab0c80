"""The chat templates of a loaded model: the usual one, and the one for tools if it has another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipfire.base.types import TextAssets
from hipfire.text.template import ChatTemplate, TemplateChoice, choose_template
from hipfire.text.tokenizer import Tokenizer
from hipfire.text.vocabulary import declared_token

# the name under which checkpoints publish a template of its own for tools
TOOL_TEMPLATE = "tool_use"


@dataclass(frozen=True, slots=True)
class Templates:
    """The templates of one model; `tools` is `chat` itself where the model has no other."""

    chat: ChatTemplate
    tools: ChatTemplate

    def pick(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """Return the template for a request with these tools."""
        return self.tools if tools else self.chat

    def faults(self) -> tuple[str, ...]:
        """Render small conversations of every kind; return one line for each that fails."""
        distinct = [self.chat] if self.tools is self.chat else [self.chat, self.tools]
        return tuple(fault for template in distinct for fault in template.check())


def load_templates(
    assets: TextAssets,
    tokenizer: Tokenizer,
    model_file: Path,
    *,
    override_file: Path | None,
    user_dir: Path | None,
) -> Templates | None:
    """Return the model's templates, or None for a base model; ArtifactError if one does not compile."""
    bos = None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
    eos = _eos_text(assets, tokenizer)

    def choose(name: str | None) -> TemplateChoice | None:
        return choose_template(
            assets, override_file=override_file, user_dir=user_dir, model_stem=model_file.name, name=name
        )

    usual, with_tools = choose(None), choose(TOOL_TEMPLATE)
    if usual is None:
        return None
    chat = ChatTemplate(usual.source, bos_token=bos, eos_token=eos, origin=usual.origin)
    if with_tools is None or with_tools.source == usual.source:
        return Templates(chat, chat)
    tools = ChatTemplate(with_tools.source, bos_token=bos, eos_token=eos, origin=with_tools.origin)
    return Templates(chat, tools)


def _eos_text(assets: TextAssets, tokenizer: Tokenizer) -> str | None:
    """Return the one end token that templates print, which the set of end tokens does not tell."""
    declared = declared_token(assets.tokenizer_config, "eos")
    if declared is not None:
        return declared
    number = (assets.gguf or {}).get("tokenizer.ggml.eos_token_id")
    if not isinstance(number, int) or not 0 <= number < tokenizer.vocab_size:
        return None
    return tokenizer.token_text(number)

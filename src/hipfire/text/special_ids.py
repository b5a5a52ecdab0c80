"""Which token ids begin a text, end a turn or stand for the unknown, from all that a model declares.

Every source may be silent; end tokens are the union of all sources, since one source alone is often wrong.
This file knows nothing about files or text; `token_id` looks a token up by its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hipfire.base.types import TextAssets
from hipfire.text.vocabulary import declared_token

_PREFIX: Final = "tokenizer.ggml."
# what closes a turn or a document in published chat templates
_TURN_ENDS: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|eot|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<|END_OF_TURN_TOKEN|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
)
# in vocabularies with this token <|end|> only closes a channel, and the turn goes on
_CHANNEL_STYLE: Final = "<|return|>"


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids with a role, None or empty if the model has none; `add_bos` is the model's own rule or None."""

    bos: int | None
    eos: frozenset[int]
    unk: int | None
    add_bos: bool | None


def special_ids(assets: TextAssets, token_id: Callable[[str], int | None], rows: int) -> SpecialIds:
    """Return the ids that `assets` declare; ids outside [0, rows) do not exist and are ignored."""
    named = _Named(assets, token_id, rows)
    ends: set[int] = set(named.ids("eos"))
    for key in ("eot", "eom"):
        ends.update(named.from_gguf(key))
    for source in assets.chat_templates.values():
        ends |= turn_ends(source, token_id)
    if not assets.chat_templates and token_id("<|im_start|>") is not None:
        ends |= turn_ends("<|im_end|>", token_id)
    add_bos = assets.tokenizer_config.get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = (assets.gguf or {}).get(_PREFIX + "add_bos_token")
    return SpecialIds(
        bos=next(iter(named.ids("bos")), None),
        eos=frozenset(ends),
        unk=next(iter(named.ids("unk")), None),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )


def turn_ends(template: str, token_id: Callable[[str], int | None]) -> frozenset[int]:
    """Return the ids of the turn-end markers that a chat template's source writes and the vocabulary has."""
    found = set()
    for text in _TURN_ENDS:
        number = token_id(text) if text in template else None
        if number is not None and not (text == "<|end|>" and token_id(_CHANNEL_STYLE) is not None):
            found.add(number)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Named:
    """Looks one role up in every source, the most explicit first."""

    assets: TextAssets
    token_id: Callable[[str], int | None]
    rows: int

    def ids(self, role: str) -> list[int]:
        sources: list[Mapping[str, Any]] = [self.assets.generation_config]
        # next to a GGUF vocabulary the config was written by a converter, which fills ids in by default
        if self.assets.gguf is None:
            config = self.assets.model_config
            nested = config.get("text_config")
            sources += [config, nested] if isinstance(nested, Mapping) else [config]
        found = self._valid([self._declared(role)])
        found += self.from_gguf({"unk": "unknown"}.get(role, role))
        for source in sources:
            found += self._valid(_several(source.get(f"{role}_token_id")))
        return found

    def from_gguf(self, key: str) -> list[int]:
        return self._valid(_several((self.assets.gguf or {}).get(f"{_PREFIX}{key}_token_id")))

    def _declared(self, role: str) -> int | None:
        text = declared_token(self.assets.tokenizer_config, role)
        return self.token_id(text) if text is not None else None

    def _valid(self, numbers: Iterable[Any]) -> list[int]:
        return [
            int(number)
            for number in numbers
            if number is not None and not isinstance(number, bool | str | float) and 0 <= number < self.rows
        ]


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]

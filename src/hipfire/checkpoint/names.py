"""One set of tensor names for all sources: the Hugging Face names, mapped to what a file really holds.

A model file states its rules as data (`NameRule`); this file applies them. It changes no bytes: where a
source orders rows or offsets values differently, the rule's `change` says so and the reader of the bytes
acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hipfire.base.errors import ArtifactError
from hipfire.base.types import TensorInfo
from hipfire.checkpoint.source import Checkpoint
from hipfire.checkpoint.stacks import StackPiece, find_pieces, stack_info

# q_rows, k_rows: rotary rows are interleaved per query or key head; minus_one: values are stored plus one;
# log_negative: of x, -exp(x) is stored; gate_rows: in every source, a head's gates follow its queries
Change = Literal["none", "q_rows", "k_rows", "minus_one", "log_negative", "gate_rows"]

# wrappers that multimodal and older checkpoints put around the text model's names, in the order tried
PREFIXES = (
    ("", ""),
    ("model.", "model.language_model."),
    ("", "language_model."),
    ("", "model."),
    ("model.", ""),
)


@dataclass(frozen=True, slots=True)
class NameRule:
    """One tensor's canonical name and its GGUF name; `{i}` stands for the layer index in both.

    A stack of experts has `forms` besides, the other ways in which files hold it: see `stacks.find_pieces`.
    """

    canonical: str
    gguf: str
    change: Change = "none"
    forms: tuple[tuple[str, ...], ...] = ()


# the names that decoder-only models of all families share; a model adds its own or replaces some
DECODER_RULES = (
    NameRule("model.embed_tokens.weight", "token_embd.weight"),
    NameRule("model.norm.weight", "output_norm.weight"),
    NameRule("lm_head.weight", "output.weight"),
    NameRule("model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight"),
    NameRule("model.layers.{i}.self_attn.q_proj.weight", "blk.{i}.attn_q.weight"),
    NameRule("model.layers.{i}.self_attn.k_proj.weight", "blk.{i}.attn_k.weight"),
    NameRule("model.layers.{i}.self_attn.v_proj.weight", "blk.{i}.attn_v.weight"),
    NameRule("model.layers.{i}.self_attn.o_proj.weight", "blk.{i}.attn_output.weight"),
    NameRule("model.layers.{i}.self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight"),
    NameRule("model.layers.{i}.self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight"),
    NameRule("model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight"),
    NameRule("model.layers.{i}.mlp.gate_proj.weight", "blk.{i}.ffn_gate.weight"),
    NameRule("model.layers.{i}.mlp.up_proj.weight", "blk.{i}.ffn_up.weight"),
    NameRule("model.layers.{i}.mlp.down_proj.weight", "blk.{i}.ffn_down.weight"),
)


def override_rules(rules: Sequence[NameRule], *own: NameRule) -> tuple[NameRule, ...]:
    """Return `rules` with those of the same canonical name replaced by `own`, new ones added."""
    merged = {rule.canonical: rule for rule in rules}
    merged.update({rule.canonical: rule for rule in own})
    return tuple(merged.values())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor found in a checkpoint, with the change that leads to its canonical form.

    A stack of experts is made of `pieces`, and `info` describes the whole.
    """

    info: TensorInfo
    change: Change = "none"
    pieces: tuple[StackPiece, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the stored tensors that hold it."""
        return tuple(piece.info.name for piece in self.pieces) or (self.info.name,)


class NamedCheckpoint:
    """A checkpoint seen under its model's canonical names.

    `interleaved` tells that the rows of query and key weights are in the file's order although its names are
    canonical: containers that another writer made from GGUF files without reordering them.
    """

    def __init__(
        self, checkpoint: Checkpoint, rules: Sequence[NameRule], layers: int, *, interleaved: bool = False
    ) -> None:
        self.checkpoint = checkpoint
        self._rules: Mapping[str, NameRule] = {rule.canonical: rule for rule in expand_rules(rules, layers)}
        self._gguf = checkpoint.kind == "gguf"
        self._interleaved = interleaved

    def find(self, name: str) -> StoredTensor | None:
        """Return where the canonical tensor `name` is stored, or None if the checkpoint lacks it."""
        rule = self._rules.get(name)
        stored = name if rule is None or not self._gguf else rule.gguf
        if rule is not None and rule.forms:
            pieces = find_pieces(stored, rule.forms, self._find)
            return StoredTensor(stack_info(name, pieces), pieces=pieces) if pieces else None
        info = self._find(stored)
        return None if info is None else StoredTensor(info, self.change_of(name))

    def _find(self, name: str) -> TensorInfo | None:
        """Return the stored tensor of this name, or of the same with another wrapper's prefix."""
        tensors = self.checkpoint.tensors
        if self._gguf:
            return tensors.get(name)
        for old, new in PREFIXES:
            if name.startswith(old):
                info = tensors.get(new + name[len(old) :])
                if info is not None:
                    return info
        return None

    def change_of(self, name: str) -> Change:
        """Return the change that leads from the stored form of a canonical tensor to its own."""
        rule = self._rules.get(name)
        if rule is None:
            return "none"
        if (
            self._gguf
            or rule.change == "gate_rows"
            or (self._interleaved and rule.change in ("q_rows", "k_rows"))
        ):
            return rule.change
        return "none"

    def require(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return where `name` is stored; ArtifactError if it is missing or has another shape.

        Sizes of one do not count: a vector may be stored as a matrix of one row. Containers that the original
        engine made from GGUF files keep GGUF's reversed order of sizes.
        """
        stored = self.find(name)
        if stored is None:
            raise ArtifactError(
                "the model needs this tensor but the file lacks it",
                path=self.checkpoint.path,
                field=f"tensor {name}",
                hint="the checkpoint is incomplete or its config is another model's",
            )
        found = stored.info.shape
        accepted = [shape, shape[::-1]] if self.checkpoint.kind == "hfq" else [shape]
        if _squeezed(found) not in [_squeezed(candidate) for candidate in accepted]:
            raise ArtifactError(
                f"has shape {list(found)} but the model needs {list(shape)}",
                path=self.checkpoint.path,
                field=f"tensor {stored.info.name}",
                hint="config and weights belong to different models",
            )
        return stored

    def unknown(self, used: Iterable[str]) -> list[str]:
        """Return the stored tensors that none of the `used` canonical names refers to, in file order."""
        found = (self.find(name) for name in used)
        taken = {name for stored in found if stored is not None for name in stored.names}
        return [name for name in self.checkpoint.tensors if name not in taken]


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def expand_rules(rules: Sequence[NameRule], layers: int) -> list[NameRule]:
    """Return the rules with `{i}` replaced by every layer index below `layers`."""
    expanded = []
    for rule in rules:
        if "{i}" not in rule.canonical:
            expanded.append(rule)
            continue
        for index in range(layers):
            canonical = rule.canonical.replace("{i}", str(index))
            gguf = rule.gguf.replace("{i}", str(index))
            forms = tuple(tuple(part.replace("{i}", str(index)) for part in form) for form in rule.forms)
            expanded.append(NameRule(canonical, gguf, rule.change, forms))
    return expanded

"""What a checkpoint is: its model family, its configuration, and its tensors under canonical names.

This file reads descriptions only; no weight is touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hipfire.base.errors import ArtifactError, UnsupportedError
from hipfire.checkpoint.hfq import HfqFile
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.checkpoint.source import Checkpoint
from hipfire.models.family import ModelConfig, ModelFamily, family_of, family_of_gguf
from hipfire.models.fields import GgufFields

# tensors of the text model, under the names of GGUF files and of checkpoints with and without wrappers
TEXT_MODEL = re.compile(
    r"blk\.\d+\.|output(_norm)?\.|token_embd\.|rope_"
    r"|(language_model\.)?(model\.)?(language_model\.)?(layers\.\d+\.|norm\.|embed_tokens\.|lm_head\.)"
)
# buffers that older checkpoints store, and the head's matrix where the head is tied
HARMLESS = ("rotary_emb.inv_freq", "lm_head.weight", "output.weight")

# a head that predicts further tokens, for speculation: no part of the model proper
DRAFT_HEAD = re.compile(r"((language_model\.)?(model\.)?(language_model\.)?mtp\.)|blk\.\d+\.nextn\.")
GGUF_LAYER = re.compile(r"blk\.(\d+)\.")

# header numbers from here on are hipfire's own
OWN_NUMBERS = 200

# the mark in a container's metadata that rotary rows are in half-split order, whatever the source was
ROW_ORDER_KEY, HALF_SPLIT = "row_order", "half_split"


def read_config(checkpoint: Checkpoint) -> tuple[ModelFamily, ModelConfig]:
    """Return the family and configuration of a checkpoint; UnsupportedError names what is not supported."""
    if checkpoint.kind == "gguf":
        fields = GgufFields(checkpoint.model_config, checkpoint.tensors)
        family = family_of_gguf(fields.architecture)
        return family, family.from_gguf(fields)
    config = checkpoint.model_config
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ArtifactError(
            "is missing",
            path=checkpoint.path,
            field="config model_type",
            hint="the checkpoint needs its config.json",
        )
    family = family_of(model_type)
    # the original wrote 0 for families that its table has no number for
    accepted = {family.arch_id, 0} if family.arch_id >= OWN_NUMBERS else {family.arch_id}
    if isinstance(checkpoint, HfqFile) and checkpoint.arch_id not in accepted:
        raise ArtifactError(
            f"is {checkpoint.arch_id} but {model_type} models have {family.arch_id}",
            path=checkpoint.path,
            field="arch_id",
            hint="the container was written for another model",
        )
    return family, family.from_hf(_with_tie(config, checkpoint))


def named_checkpoint(checkpoint: Checkpoint, family: ModelFamily, config: ModelConfig) -> NamedCheckpoint:
    """Return the checkpoint under canonical names."""
    metadata: Mapping[str, Any] = checkpoint.metadata if isinstance(checkpoint, HfqFile) else {}
    interleaved = metadata.get("source") == "gguf" and metadata.get(ROW_ORDER_KEY) != HALF_SPLIT
    return NamedCheckpoint(checkpoint, family.names, config.sizes.layers, interleaved=interleaved)


def unused_tensors(named: NamedCheckpoint, config: ModelConfig) -> list[str]:
    """Return the stored tensors that the model has no use for, such as those of a vision tower.

    Raises UnsupportedError if one of them belongs to the text model: a bias, a norm or a layer that is left
    out gives wrong answers, not an error.
    """
    unused = named.unknown([*config.tensors(), *config.optional_tensors()])
    drafts = set(draft_head(named, config))
    candidates = [name for name in unused if name not in drafts]
    needed = [name for name in candidates if TEXT_MODEL.match(name) and not name.endswith(HARMLESS)]
    if needed:
        raise UnsupportedError(
            f"the text model has {len(needed)} tensors, such as {needed[0]}, that this architecture lacks",
            hint="config and weights belong to different models, or this is a variant that is not supported",
        )
    return unused


def draft_head(named: NamedCheckpoint, config: ModelConfig) -> list[str]:
    """Return the stored tensors of a head that predicts further tokens, in file order.

    GGUF files keep its layers behind the model's own, in blocks of which some tensor says so by its name.
    """
    tensors = list(named.checkpoint.tensors)
    found = (GGUF_LAYER.match(name) for name in tensors if DRAFT_HEAD.match(name))
    blocks = {match.group() for match in found if match and int(match.group(1)) >= config.sizes.layers}

    def belongs(name: str) -> bool:
        layer = GGUF_LAYER.match(name)
        return bool(DRAFT_HEAD.match(name)) if layer is None else layer.group() in blocks

    return [name for name in tensors if belongs(name)]


def _with_tie(config: Mapping[str, Any], checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Containers made from GGUF by the original do not say whether the head is tied: a missing head is."""
    says = config.get("tie_word_embeddings") is not None or "text_config" in config
    if checkpoint.kind != "hfq" or says:
        return config
    return {
        **config,
        "tie_word_embeddings": not any(n.endswith("lm_head.weight") for n in checkpoint.tensors),
    }

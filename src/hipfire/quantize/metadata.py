"""The metadata of a container that the quantizer writes: config, tokenizer, templates, origin."""

from __future__ import annotations

from typing import Any

from hipfire.checkpoint.hfq import HfqFile
from hipfire.checkpoint.source import Checkpoint
from hipfire.models.family import ModelConfig
from hipfire.runtime.identify import HALF_SPLIT, ROW_ORDER_KEY


def container_metadata(checkpoint: Checkpoint, config: ModelConfig, recipe: str) -> dict[str, Any]:
    """Return the metadata object of a container made from `checkpoint` by the named recipe.

    A GGUF source keeps all its keys under `gguf_meta`, from which its tokenizer is read; a safetensors source
    keeps its JSON files; a container keeps what it had.
    """
    common = {"hipfire_quant_recipe": recipe, ROW_ORDER_KEY: HALF_SPLIT}
    if isinstance(checkpoint, HfqFile):
        return {**checkpoint.metadata, **common}
    if checkpoint.kind == "gguf":
        keys = dict(checkpoint.model_config)
        model = config.to_hf()
        for role in ("bos", "eos"):
            # a made-up default would end replies at an ordinary token
            if f"tokenizer.ggml.{role}_token_id" in keys:
                model[f"{role}_token_id"] = keys[f"tokenizer.ggml.{role}_token_id"]
        return {
            "architecture": str(keys.get("general.architecture")),
            "config": model,
            "source": "gguf",
            "gguf_meta": keys,
            **common,
        }
    assets = checkpoint.text_assets()
    return {
        "architecture": str(checkpoint.model_config.get("model_type")),
        "config": dict(checkpoint.model_config),
        "tokenizer": assets.tokenizer_json or "{}",
        "tokenizer_config": dict(assets.tokenizer_config) or None,
        "generation_config": dict(assets.generation_config) or None,
        **common,
    }

"""What the descriptions in a checkpoint tell about a load, checked against the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hipfire.base.errors import ValidationError
from hipfire.base.types import TextAssets
from hipfire.cache.block import BLOCK_MODES
from hipfire.cache.kv import KV_MODES, KvMode, kv_mode
from hipfire.checkpoint.names import NamedCheckpoint
from hipfire.checkpoint.source import Checkpoint
from hipfire.models.family import ModelConfig, ModelFamily
from hipfire.runtime.identify import named_checkpoint, read_config, unused_tensors
from hipfire.runtime.load_options import LoadOptions
from hipfire.runtime.templates import Templates, load_templates
from hipfire.text.tokenizer import Tokenizer

# the context that a load takes unless told otherwise, where the model itself allows more
DEFAULT_MAX_SEQ = 32768


@dataclass(frozen=True)
class Description:
    """What is to be loaded. `templates` is None for a base model; `unknown_tensors` have no use."""

    family: ModelFamily
    config: ModelConfig
    named: NamedCheckpoint
    mode: KvMode
    max_seq: int
    assets: TextAssets
    tokenizer: Tokenizer
    templates: Templates | None
    unknown_tensors: tuple[str, ...]


def describe(checkpoint: Checkpoint, path: Path, options: LoadOptions, *, on_gpu: bool) -> Description:
    """Read a checkpoint's descriptions; raises whatever `load_model` raises before it takes memory."""
    mode = kv_mode(options.kv_cache, BLOCK_MODES if on_gpu else KV_MODES)
    family, config = read_config(checkpoint)
    named = named_checkpoint(checkpoint, family, config)
    unknown = unused_tensors(named, config)
    max_seq = _context(options, config)
    assets = checkpoint.text_assets()
    tokenizer = Tokenizer.from_assets(assets, config.sizes.vocab_size)
    templates = load_templates(
        assets,
        tokenizer,
        path,
        override_file=options.template_file,
        user_dir=options.template_dir,
    )
    return Description(family, config, named, mode, max_seq, assets, tokenizer, templates, tuple(unknown))


def _context(options: LoadOptions, config: ModelConfig) -> int:
    limit = config.sizes.max_positions
    if options.max_seq is None:
        return min(limit, DEFAULT_MAX_SEQ)
    if not 1 <= options.max_seq <= limit:
        raise ValidationError(
            f"max_seq = {options.max_seq} but this model handles 1 to {limit} tokens",
            hint="lower memory.max_seq or leave it out",
        )
    return options.max_seq

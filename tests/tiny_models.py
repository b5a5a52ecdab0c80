"""Tiny random models made by transformers, as safetensors folders and as GGUF files, with a real tokenizer.

Names and row orders of GGUF are stated here once more, apart from the code under test.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny_hybrid
from hipfire.runtime.load import LoadedModel, LoadOptions, load_model

# 256 bytes, three control tokens and one merge; four rows of the embedding are spare
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
IM_START, IM_END, END_OF_TEXT = 256, 257, 258
ROWS = 264
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = [IM_START, 72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, IM_END, 10, 65, 66, 67, 0, 255, 64]
SHARED: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 256, "intermediate_size": 352, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
    "bos_token_id": None, "eos_token_id": IM_END, "pad_token_id": None,
}  # fmt: skip
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 32,
        },
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", tiny_hybrid.FIELDS),
}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA_NAMES = {
    **GGUF_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tiny_model(kind: str, *, dtype: torch.dtype = torch.float32, **change: Any) -> Any:
    """Return a transformers model with random weights whose norms are far from one and from each other.

    Weights are multiples of 2^-9 below 1: exact in float16 and bfloat16, also plus or minus one.
    """
    model_class, config_class, fields = KINDS[kind]
    config = getattr(transformers, config_class)(**{**SHARED, **fields, **change})
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale, base = (16.0, parameter) if "norm" in name else (8.0, torch.zeros_like(parameter))
            steps = (torch.randn_like(parameter) * scale).round().clamp(-60, 60)
            parameter.copy_(base + steps / (64.0 if "norm" in name else 256.0))
        if not config.tie_word_embeddings:
            # the end token never has the largest logit, so that greedy replies have the length asked for
            model.lm_head.weight[IM_END] = 0.0
            model.lm_head.weight[END_OF_TEXT] = 0.0
    return model.to(dtype)


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """Return the tokens of a byte-level vocabulary: byte b is token b, then controls, then one merge."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    symbols = [chr(byte if byte in plain else next(moved)) for byte in range(256)]
    return (*symbols, *CONTROLS, "AB")


@functools.cache
def tokenizer_text() -> str:
    """Return the vocabulary as `tokenizer.json`."""
    vocab = {token: number for number, token in enumerate(vocabulary())}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("A", "B")]))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in CONTROLS])
    return str(engine.to_str())


def write_folder(folder: Path, model: Any, *, shards: bool = False, jinja: bool = False) -> Path:
    """Save a model as transformers does, with a tokenizer; the template in a file of its own with `jinja`."""
    model.save_pretrained(folder, max_shard_size="1MB" if shards else "1GB")
    (folder / "tokenizer.json").write_text(tokenizer_text(), encoding="utf-8")
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if jinja:
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    else:
        config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def change_weights(folder: Path, changes: Mapping[str, torch.Tensor | None]) -> Path:
    """Replace, add or (None) remove tensors of a folder that has one weight file."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: values.contiguous() for name, values in tensors.items() if values is not None}, path)
    return folder


def change_config(folder: Path, **fields: Any) -> Path:
    """Set fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}), encoding="utf-8")
    return folder


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights that a checkpoint of this model holds, as float32."""
    tied = model.config.tie_word_embeddings
    state = model.state_dict().items()
    return {n: values.detach().float() for n, values in state if not (tied and n == "lm_head.weight")}


def gguf_name(kind: str, name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in top:
        return f"{top[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    if kind == "qwen3_5" and part in tiny_hybrid.NAMES:
        return f"blk.{layer}.{tiny_hybrid.NAMES[part]}"
    return f"blk.{layer}.{(GEMMA_NAMES if kind == 'gemma3' else GGUF_NAMES)[part]}.weight"


def interleaved(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows so that those which rotate together are neighbours, as llama GGUF files have them."""
    rows, cols = values.shape
    halves = values.view(heads, 2, rows // heads // 2, cols)
    return torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(rows, cols)


def write_gguf(path: Path, model: Any, types: Mapping[str, str] | None = None, **keys: Any) -> Path:
    """Write a model as GGUF and set its weights to what the file's blocks decode to.

    `types` maps parts of GGUF names to GGML types; other matrices are F32. `keys` are further metadata.
    """
    config = model.config
    kind = config.model_type.removesuffix("_text")
    hybrid = kind == "qwen3_5"
    writer = gguf.GGUFWriter(path, "qwen35" if hybrid else kind)
    write_keys(writer, config, kind, keys)
    state = model.state_dict()
    for name, values in weights_of(model).items():
        stored = gguf_name(kind, name)
        heads = rotary_heads(config, stored) if kind == "llama" else 0
        plain = interleaved(values, heads) if heads else values
        if kind == "gemma3" and "norm" in name:
            plain = plain + 1.0
        if hybrid:
            plain = tiny_hybrid.stored(config, name, values)
        chosen = next((kind_ for part, kind_ in (types or {}).items() if part in stored), "F32")
        matrix = plain.ndim == 2 and "conv1d" not in name
        ggml = gguf.GGMLQuantizationType[chosen if matrix else "F32"]
        blocks = gguf.quants.quantize(plain.numpy(), ggml)
        writer.add_tensor(stored, blocks, raw_dtype=ggml)
        decoded = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, ggml))).view(plain.shape)
        if heads:
            rows, cols = decoded.shape
            decoded = decoded.view(heads, rows // heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)
        if kind == "gemma3" and "norm" in name:
            decoded = decoded - 1.0
        if hybrid:
            decoded = tiny_hybrid.restored(config, name, decoded)
        state[name].copy_(decoded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rotary_heads(config: Any, stored: str) -> int:
    if ".attn_q.weight" in stored:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".attn_k.weight" in stored else 0


def write_keys(writer: gguf.GGUFWriter, config: Any, kind: str, keys: Mapping[str, Any]) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if kind == "qwen3_5":
        tiny_hybrid.write_keys(writer, config)
    if kind == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        pattern = [layer == "sliding_attention" for layer in config.layer_types]
        writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(vocabulary()))
    writer.add_token_types([1] * 256 + [3] * len(CONTROLS) + [1])
    writer.add_token_merges(["A B"])
    writer.add_chat_template(TEMPLATE)
    for name, value in keys.items():
        writer.add_uint32(f"tokenizer.ggml.{name}", value)


def load(path: Path) -> LoadedModel:
    """Load a model with a float32 cache."""
    return load_model(path, LoadOptions(kv_cache="f32", max_seq=64, residency="decoded"))


def logits(path: Path, tokens: list[int] = TOKENS) -> torch.Tensor:
    """Return the logits [T, vocab] that hipfire computes from a file."""
    return load(path).runner.all_logits(0, tokens)


def reference(model: Any, tokens: list[int] = TOKENS) -> torch.Tensor:
    """Return the logits [T, vocab] that transformers computes in float32."""
    with torch.no_grad():
        return model.float()(torch.tensor([tokens])).logits[0]

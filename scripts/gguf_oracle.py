"""An oracle for real GGUF files that shares no code with hipfire: gguf's decoders, transformers' models.

Names, row order and norm offsets are handled by its own few lines, so that an error in hipfire's importer
cannot hide in the reference. Supports the architectures that the project's real models have: llama and
gemma3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FFN_NORM = {"llama": "post_attention_layernorm", "gemma3": "pre_feedforward_layernorm"}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def load_oracle(path: Path) -> Any:
    """Return the transformers model of a GGUF file, float32, with the file's own dequantized weights."""
    reader = gguf.GGUFReader(path)

    def key(name: str, default: Any = None) -> Any:
        field = reader.fields.get(name)
        return default if field is None else field.contents()

    architecture = key("general.architecture")
    heads = int(key(f"{architecture}.attention.head_count"))
    kv_heads = int(key(f"{architecture}.attention.head_count_kv", heads))
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if architecture == "llama" and ".attn_q." in tensor.name:
            values = half_split(values, heads)
        if architecture == "llama" and ".attn_k." in tensor.name:
            values = half_split(values, kv_heads)
        if architecture == "gemma3" and tensor.name.endswith("norm.weight"):
            values = values - np.float32(1)
        state[hf_name(tensor.name, architecture)] = torch.from_numpy(np.ascontiguousarray(values))
    vocab = state["model.embed_tokens.weight"].shape[0]
    model = _empty_model(architecture, key, vocab, tied="lm_head.weight" not in state)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the oracle does not match the file: {missing} {unexpected}")
    model.tie_weights()
    return model.eval()


def half_split(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo the pairing of rotary rows in llama GGUF files: [.., d/2, 2] becomes [.., 2, d/2]."""
    rows, cols = values.shape
    return values.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def hf_name(name: str, architecture: str) -> str:
    """Return the transformers name of a GGUF tensor."""
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{TOP_NAMES[parts[0]]}.weight"
    stem = FFN_NORM[architecture] if parts[2] == "ffn_norm" else LAYER_NAMES[parts[2]]
    return f"model.layers.{parts[1]}.{stem}.weight"


def _empty_model(architecture: str, key: Any, vocab: int, *, tied: bool) -> Any:
    def number(name: str) -> Any:
        return key(f"{architecture}.{name}")

    common = {
        "vocab_size": vocab,
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": number("context_length"),
        "tie_word_embeddings": tied,
        "attn_implementation": "eager",
    }
    if architecture == "llama":
        rope = {"rope_type": "default", "rope_theta": number("rope.freq_base")}
        config: Any = transformers.LlamaConfig(**common, rope_parameters=rope)
        return transformers.LlamaForCausalLM(config)
    if architecture != "gemma3":
        raise SystemExit(f"no oracle for the architecture {architecture}")
    config = transformers.Gemma3TextConfig(
        **common,
        head_dim=number("attention.key_length"),
        query_pre_attn_scalar=number("attention.key_length"),
        sliding_window=number("attention.sliding_window"),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": number("rope.freq_base")},
        },
    )
    return transformers.Gemma3ForCausalLM(config)
